// The timeline of a step: operations, collectives by the links that they use, and memory. One component draws the whole
// step and one iteration of a loop. If iterations are too narrow, one block shows the content of the loop.

const NARROW_ROUND = 6, MEMORY_HEIGHT = 84;
const LANES = [['phase', 'phase', 17], ['loops', 'loops', 15], ['compute', 'compute', 48], ['copies', 'copies', 12], ['fast', 'fast links', 24], ['network', 'network', 24], ['memory', 'memory', MEMORY_HEIGHT]];

// ---------------------------------------------------------------- spans

// Returns a span of the data with its operation or collective; for a loop, with a summary of one iteration.
function readSpan([what, start, end, live, rounds, inside]) {
  const span = { start, end, live, op: what >= 0 ? operations[what] : null, collective: what < 0 ? collectives[-1 - what] : null };
  if (!inside) return span;
  Object.assign(span, { name: what, rounds, inside: inside.map(readSpan), length: (end - start) / rounds });
  const { loops, ...made } = summaryOf(span.inside);
  return Object.assign(span, made, { depth: loops + 1 });
}

// Returns a summary of spans: peak of live bytes, and seconds by layer and phase, by lane, and of waiting.
function summaryOf(spans) {
  const sum = { peak: 0, lanes: {}, parts: new Map(), waits: 0, loops: 0 };
  const part = (layer, phase, secs) => {
    const key = `${groupOf(layer)}|${phase}`, found = sum.parts.get(key) || { layer, group: groupOf(layer), phase, seconds: 0 };
    found.seconds += secs;
    sum.parts.set(key, found);
  };
  for (const span of spans) {
    const times = span.inside ? span.rounds : 1;
    sum.peak = Math.max(sum.peak, span.live + (span.inside ? span.peak : 0));
    for (const lane of Object.keys(span.inside ? span.lanes : laneSeconds(span))) sum.lanes[lane] = (sum.lanes[lane] || 0) + times * (span.inside ? span.lanes[lane] : span.end - span.start);
    if (span.inside) {
      sum.loops = Math.max(sum.loops, span.depth);
      sum.waits += times * span.waits;
      for (const { layer, phase, seconds: secs } of span.parts.values()) part(layer, phase, times * secs);
    }
    if (span.op && !isCopy(span)) part(span.op.layer, span.op.phase, span.end - span.start);
    if (span.collective) sum.waits += span.collective.exposed;
  }
  return sum;
}

const isCopy = (span) => span.op !== null && span.op.opcode.endsWith('-start');

function lanesOf(span) {
  if (span.op) return [isCopy(span) ? 'copies' : 'compute'];
  const c = span.collective;
  return c ? ['fast', 'network'].filter((lane) => c[`${lane}_bytes`] > 0) : [];
}
const laneSeconds = (span) => Object.fromEntries(lanesOf(span).map((lane) => [lane, span.end - span.start]));

// Returns the phase that takes most of an iteration. A loop with backward work counts as backward, since recomputation
// serves the backward pass.
function mainPhase(loop) {
  const phases = {};
  for (const { phase, seconds: secs } of loop.parts.values()) phases[phase] = (phases[phase] || 0) + secs;
  if (phases.backward) return 'backward';
  return Object.keys(phases).sort((a, b) => phases[b] - phases[a])[0] || '';
}

// Returns the common part of the paths of the layers that take most of a loop.
function loopName(loop) {
  const parts = [...loop.parts.values()].filter((part) => part.group), most = Math.max(...parts.map((part) => part.seconds));
  const paths = parts.filter((part) => part.seconds > most / 10).map((part) => part.layer.split('.'));
  if (!paths.length) return loop.name;
  let n = 0;
  while (n < paths[0].length && paths.every((path) => path[n] === paths[0][n])) n++;
  return paths[0].slice(0, n).join('.') || loop.name;
}

const roundsText = (loop) => `${Number(loop.rounds.toFixed(1))} × ${seconds(loop.length)}`;

// ---------------------------------------------------------------- the component

class Timeline {
  // `enlarge` is called with a loop that is clicked.
  constructor(canvas, enlarge) {
    this.canvas = canvas; this.enlarge = enlarge;
    const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.onpointerdown = (event) => { [this.pressed] = at(event); this.dragged = this.pressed; };
    canvas.onpointermove = (event) => {
      const [x, y] = at(event);
      if (this.pressed === undefined || !event.buttons) { this.pressed = undefined; this.point(event, x, y); return; }
      this.dragged = x; hideTip(); this.draw();
    };
    canvas.onpointerup = (event) => {
      const [x, y] = at(event), from = this.pressed;
      this.pressed = undefined;
      if (from === undefined) return;
      if (Math.abs(x - from) > 5) this.zoom(...[this.time(from), this.time(x)].sort((a, b) => a - b));
      else { const hit = this.hit(x, y); this.draw(); if (hit && hit.loop) this.enlarge(hit.loop); else this.point(event, x, y); }
    };
    canvas.onpointerleave = () => { hideTip(); };
    canvas.ondblclick = () => this.zoom(0, this.length);
    canvas.onkeydown = (event) => {
      const width = this.to - this.from, middle = (this.from + this.to) / 2;
      const move = { '+': [middle - width / 4, middle + width / 4], '=': [middle - width / 4, middle + width / 4], '-': [middle - width, middle + width], ArrowLeft: [this.from - width / 5, this.to - width / 5], ArrowRight: [this.from + width / 5, this.to + width / 5], 0: [0, this.length] }[event.key];
      if (!move) return;
      event.preventDefault();
      this.zoom(...move);
    };
  }

  // Shows spans that take `length` seconds, on top of `base` bytes of memory.
  show(spans, length, base) {
    const { lanes, peak, loops } = summaryOf(spans);
    Object.assign(this, { spans, length, base, peak: base + peak, from: 0, to: length });
    const height = { loops: 15 * loops };
    this.lanes = LANES.filter(([key]) => lanes[key] || ['phase', 'compute', 'memory'].includes(key) || (key === 'loops' && loops)).map(([key, name, h]) => ({ key, name, h: height[key] || h }));
    let y = 0;
    for (const lane of this.lanes) { lane.y = y; y += lane.h + 4; }
    this.height = y + 18;
    this.draw();
  }

  zoom(from, to) {
    const width = Math.min(Math.max(to - from, this.length * 1e-6), this.length);
    this.from = Math.min(Math.max(from, 0), this.length - width);
    this.to = this.from + width;
    this.draw();
  }

  x(time) { return this.left + ((time - this.from) / (this.to - this.from)) * (this.width - this.left); }
  time(x) { return this.from + ((x - this.left) / (this.width - this.left)) * (this.to - this.from); }
  lane(key) { return this.lanes.find((lane) => lane.key === key); }

  // Calls see(span, start, end, base, depth) for each span in view. It enters a loop only if its iterations are wide enough.
  visit(spans, at, base, depth, see) {
    for (const span of spans) {
      const start = at + span.start, end = at + span.end;
      if (end < this.from || start > this.to) continue;
      see(span, start, end, base, depth);
      if (!span.inside || this.x(start + span.length) - this.x(start) < NARROW_ROUND) continue;
      const first = Math.max(Math.floor((this.from - start) / span.length), 0);
      for (let k = first; k < span.rounds && start + k * span.length < this.to; k++) this.visit(span.inside, start + k * span.length, base + span.live, depth + 1, see);
    }
  }

  draw() {
    const { canvas } = this, scale = devicePixelRatio || 1, context = canvas.getContext('2d');
    this.width = canvas.clientWidth || 800;
    this.left = this.width < 560 ? 58 : 84;
    canvas.style.height = `${this.height}px`;
    canvas.width = this.width * scale; canvas.height = this.height * scale;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = `${this.width < 560 ? 10 : 11}px system-ui, sans-serif`;
    context.textBaseline = 'middle';
    this.pen = new Pen(context);
    context.save();
    context.beginPath(); context.rect(this.left, 0, this.width - this.left, this.height); context.clip();
    const phases = [], memoryLine = new Float64Array(Math.ceil(this.width));
    this.visit(this.spans, 0, this.base, 0, (span, start, end, base, depth) => {
      const x0 = this.x(start), x1 = this.x(end), opened = span.inside && this.x(start + span.length) - x0 >= NARROW_ROUND;
      // The live bytes of a collective count only while it is exposed; otherwise the operations beside it give them.
      const alone = span.collective ? this.x(end - span.collective.exposed) : x0;
      if (span.live || !span.collective) this.fillMemory(memoryLine, alone, x1, base + span.live + (span.inside && !opened ? span.peak : 0));
      if (span.inside) this.drawLoop(span, x0, x1, depth);
      if (span.inside && !opened) { this.drawRounds(span, x0, x1); phases.push([x0, x1, mainPhase(span)]); }
      if (span.op && !isCopy(span)) phases.push([x0, x1, span.op.phase]);
      if (!span.inside) this.drawSpan(span, start, x0, x1);
    });
    this.drawPhases(phases);
    this.drawMemory(memoryLine);
    context.restore();
    this.drawFrame();
    if (this.pressed !== undefined) { context.globalAlpha = 0.2; this.pen.rect(Math.min(this.pressed, this.dragged), 0, Math.abs(this.dragged - this.pressed), this.height - 18, colors.accent); context.globalAlpha = 1; }
  }

  drawSpan(span, start, x0, x1) {
    const what = span.op || span.collective, faded = !matches(what.layer, what.phase, span.collective ? textOf(what) : what.opcode);
    for (const key of lanesOf(span)) {
      const { y, h } = this.lane(key);
      this.pen.block(x0, y, x1 - x0, h, groupOf(what.layer), faded);
      if (x1 - x0 > 34) this.pen.text(span.collective ? what.kind : shortName(what.layer), x0 + 4, y + h / 2, x1 - x0 - 8, faded ? colors.soft : colors.areaInk);
    }
    if (span.collective && what.exposed > 0) {
      const { y, h } = this.lane('compute');
      this.pen.hatch(this.x(start + span.end - span.start - what.exposed), y, x1, h, faded);
    }
  }

  // Draws a loop with narrow iterations: the shares of its time from top to bottom, and the utilization of links.
  drawRounds(loop, x0, x1) {
    const { y, h } = this.lane('compute'), sum = [...loop.parts.values()].reduce((total, p) => total + p.seconds, 0) + loop.waits;
    let top = y;
    for (const part of [...loop.parts.values()].sort((a, b) => groups.indexOf(a.group) - groups.indexOf(b.group))) {
      const high = (h * part.seconds) / sum;
      this.pen.block(x0, top, x1 - x0, high, part.group, !matches(part.layer, part.phase, ''));
      top += high;
    }
    if (loop.waits) this.pen.hatch(x0, top, x1, y + h - top, false);
    for (const key of ['copies', 'fast', 'network']) {
      const lane = this.lane(key), busy = Math.min((loop.lanes[key] || 0) / loop.length, 1);
      if (!lane || !busy) continue;
      this.pen.rect(x0, lane.y + lane.h * (1 - busy), x1 - x0, lane.h * busy, colors.whole);
      if (x1 - x0 > 90) this.pen.text(`${percent(busy)} in use`, x0 + 4, lane.y + lane.h / 2, x1 - x0 - 8, colors.ink);
    }
  }

  drawLoop(loop, x0, x1, depth) {
    const lane = this.lane('loops');
    if (!lane || 15 * depth >= lane.h || x1 - x0 < 3) return;
    const y = lane.y + 15 * depth;
    this.pen.rect(x0, y, Math.max(x1 - x0 - 1, 1), 14, colors.hover);
    const from = Math.max(x0, this.left), to = Math.min(x1, this.width);
    if (to - from > 30) this.pen.text(to - from > 200 ? `${roundsText(loop)}  ${shortName(loopName(loop))}` : roundsText(loop), from + 4, y + 7, to - from - 8, colors.ink);
  }

  drawPhases(found) {
    const { y, h } = this.lane('phase'), runs = [];
    for (const [x0, x1, phase] of found.sort((a, b) => a[0] - b[0])) {
      const last = runs[runs.length - 1];
      if (last && (last.phase === phase || x1 - x0 < 0.5)) last.x1 = Math.max(x1, last.x1);
      else runs.push({ x0: last ? last.x1 : this.left, x1, phase });
    }
    if (runs.length) runs[runs.length - 1].x1 = Math.min(this.x(this.length), this.width);
    for (const { x0, x1, phase } of runs) {
      this.pen.rect(x0, y, Math.max(x1 - x0 - 0.5, 0.3), h, colors.phases[phase] || colors.hover);
      const from = Math.max(x0, this.left), to = Math.min(x1, this.width);
      if (to - from > 34) this.pen.text(phase, from + 4, y + h / 2, to - from - 8, colors.areaInk);
    }
  }

  fillMemory(line, x0, x1, size) {
    for (let x = Math.max(Math.floor(x0), this.left); x <= Math.min(x1, line.length - 1); x++) line[x] = Math.max(line[x], size);
  }

  get memoryScale() {
    const { capacity } = data.memory;
    return MEMORY_HEIGHT / (capacity < 2.2 * this.peak ? 1.08 * Math.max(capacity, this.peak) : 1.3 * this.peak);
  }

  drawMemory(line) {
    const { y, h } = this.lane('memory'), scale = this.memoryScale, bottom = y + h, { capacity, always } = data.memory;
    let size = this.base, most = 0, where = this.left;
    for (let x = this.left; x < this.width; x++) {
      size = line[x] || size;
      if (size > most * 1.0001) { most = size; where = x; }
      this.pen.rect(x, bottom - size * scale, 1, size * scale, colors.memory);
      if (size > capacity) this.pen.rect(x, bottom - size * scale, 1, (size - capacity) * scale, colors.error);
    }
    this.pen.rect(this.left, bottom - always * scale, this.width - this.left, always * scale, colors.state);
    const limit = bottom - capacity * scale, isAbove = limit < y;
    if (!isAbove) this.pen.line(this.left, limit, this.width, limit, colors.ink, []);
    this.pen.text(`capacity ${bytes(capacity)}${isAbove ? ' ↑' : ''}`, this.width - 118, isAbove ? y + 7 : limit + 9, 118, most > 0.8 * capacity ? colors.areaInk : colors.soft);
    if (most > 0.999 * this.peak) {
      const top = bottom - most * scale, text = `${data.memory.kinds.other < 0 ? "peak without sharing" : "peak"} ${bytes(most)}`, right = where + 200 > this.width;
      this.pen.line(where, top, where, bottom, colors.areaInk, [2, 2]);
      this.pen.text(text, right ? where - 160 : where + 5, Math.max(top + 22, y + h / 2), 190, colors.areaInk);
    }
  }

  drawFrame() {
    const narrow = this.width < 560;
    for (const { name, y, h, key } of this.lanes) {
      this.pen.text(name, 0, y + Math.min(h / 2, 24), this.left - 6, colors.soft);
      if (key === 'memory') this.pen.text(bytes(h / this.memoryScale), 0, y + 42, this.left - 6, colors.soft);
    }
    const width = this.to - this.from, wanted = width / (narrow ? 4 : 9);
    const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(wanted))).find((n) => n >= wanted);
    const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)), unit = this.to >= 1 ? [1, 's'] : this.to >= 1e-3 ? [1e3, 'ms'] : [1e6, 'µs'];
    const places = Math.max(0, digits - Math.log10(unit[0]));
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      const x = this.x(t);
      this.pen.line(x, 0, x, this.height - 16, colors.line, [1, 3]);
      if (x < this.width - 36) this.pen.text(`${(t * unit[0]).toFixed(places)} ${unit[1]}`, x + 2, this.height - 8, 80, colors.soft);
    }
  }

  // Returns the deepest span that is drawn at a point.
  hit(x, y) {
    const time = this.time(x), lane = this.lanes.find((l) => y >= l.y && y <= l.y + l.h), found = {};
    if (x < this.left || !lane) return null;
    found.time = time;
    this.visit(this.spans, 0, this.base, 0, (span, start, end, base) => {
      if (time < start || time > end) return;
      if (!span.collective || time > end - span.collective.exposed) found.bytes = Math.max(found.bytes || 0, base + span.live + (span.inside && this.x(start + span.length) - this.x(start) < NARROW_ROUND ? span.peak : 0));
      if (span.inside) { found.loop = span; return; }
      if (span.collective && time > end - span.collective.exposed) found.waits = span;
      if (lanesOf(span).includes(lane.key)) found.span = span;
    });
    if (lane.key === 'compute' && !found.span) found.span = found.waits;
    return { lane: lane.key, ...found };
  }

  point(event, x, y) {
    const hit = this.hit(x, y), lines = hit && tipOf(hit);
    if (lines) showTip(event, lines); else hideTip();
    this.canvas.style.cursor = hit && hit.loop && !hit.span ? 'zoom-in' : 'crosshair';
  }
}

function tipOf({ lane, span, loop, bytes: live, time }) {
  if (lane === 'memory') return live ? [bytes(live), `live at ${seconds(time)}, by the schedule`] : null;
  if (span) {
    const what = span.op || span.collective, where = what.layer || '(no layer)', phase = what.phase, times = what.count > 1 ? `, ${Number(what.count.toFixed(1))} times a ${WORK}` : '';
    if (span.op) return [where, `${phase}: ${what.opcode} ${what.name}`, `${seconds(what.seconds)}${times}; limited by ${what.limit}`, `${short(what.flops)} FLOPs, ${bytes(what.bytes)}`];
    const sent = [['fast_bytes', 'fast links'], ['network_bytes', 'the network']].filter(([key]) => what[key]).map(([key, name]) => `${bytes(what[key])} over ${name}`).join(', ');
    return [`${what.kind} over ${axesText(what)}`, `${where}, ${phase}${what.cause ? `: ${what.cause.reason}` : ''}`, causeOf(what).what, `${seconds(what.seconds)}${times}, of which ${seconds(what.exposed)} are exposed`, `each device sends ${sent}`];
  }
  if (!loop) return null;
  const parts = [...loop.parts.values()].sort((a, b) => b.seconds - a.seconds).slice(0, 5).map((p) => `${shortName(p.group)}, ${p.phase}: ${seconds(p.seconds)}`);
  return [`${loopName(loop)}: ${roundsText(loop)}`, ...parts, `waiting for communication: ${seconds(loop.waits)}`, 'Click to enlarge one round.'];
}

// ---------------------------------------------------------------- canvas

let colors = {};

function readColors() {
  const style = getComputedStyle(document.documentElement), value = (name) => style.getPropertyValue(name).trim();
  const l = Number(value('--area-l')), c = Number(value('--area-c')), area = (hue) => `oklch(${l} ${c} ${hue})`;
  const tint = (hue, chroma = 0.03) => `oklch(${l} ${chroma} ${hue})`;
  colors = {
    ...Object.fromEntries(['ink', 'soft', 'line', 'hover', 'accent', 'error', 'whole'].map((name) => [name, value(`--${name}`)])),
    areaInk: value('--area-ink'), area, memory: area(165), state: area(250),
    phases: { forward: tint(165, 0.05), recomputed: tint(70, 0.05), backward: tint(250, 0.05), update: tint(320, 0.05), prompts: tint(165, 0.05), tokens: tint(250, 0.05), other: tint(320, 0.05) },
  };
}

class Pen {
  constructor(context) { this.context = context; }
  rect(x, y, w, h, color) { this.context.fillStyle = color; this.context.fillRect(x, y, w, h); }
  block(x, y, w, h, group, faded) {
    const hue = groupHue(group);
    this.context.globalAlpha = faded ? 0.15 : 1;
    this.rect(x, y, w > 3 ? w - 0.7 : w, h, hue === null ? colors.whole : colors.area(hue));
    this.context.globalAlpha = 1;
  }
  hatch(x0, y, x1, h, faded) {
    const { context } = this;
    context.save();
    context.globalAlpha = faded ? 0.15 : 0.75;
    context.beginPath(); context.rect(x0, y, x1 - x0, h); context.clip();
    context.strokeStyle = colors.error; context.lineWidth = 1; context.beginPath();
    for (let x = x0 - h - ((x0 - h) % 5); x < x1; x += 5) { context.moveTo(x, y + h); context.lineTo(x + h, y); }
    context.stroke(); context.restore();
  }
  line(x0, y0, x1, y1, color, dash) {
    const { context } = this;
    context.strokeStyle = color; context.lineWidth = 1; context.setLineDash(dash);
    context.beginPath(); context.moveTo(x0, y0); context.lineTo(x1, y1); context.stroke(); context.setLineDash([]);
  }
  text(text, x, y, width, color) {
    const shown = fit(text, width, this.context);
    if (shown !== text && shown.length < 4) return;
    this.context.fillStyle = color; this.context.fillText(shown, x, y);
  }
}

// ---------------------------------------------------------------- both of them

const timelines = {};

// Returns all loops in spans, each with the number of its executions and the bytes that are live beside it.
function allLoops(spans, times, below) {
  return spans.filter((span) => span.inside).flatMap((loop) => {
    const base = below + loop.live;
    return [{ loop, times, base }, ...allLoops(loop.inside, times * loop.rounds, base)];
  });
}

function setUpTimelines() {
  const spans = data.schedule.map(readSpan), { always } = data.memory;
  $('time').hidden = !spans.length;
  if (!spans.length) return;
  readColors();
  const every = allLoops(spans, 1, always), long = every.filter(({ loop, times }) => times * (loop.end - loop.start) > data.headline.seconds / 50);
  const enlarge = (wanted) => {
    const { loop, base } = every.find(({ loop: other }) => other === wanted);
    timelines.round.show(loop.inside, loop.length, base);
    $('loop-chips').querySelectorAll('button').forEach((button, i) => button.setAttribute('aria-pressed', long[i].loop === loop));
  };
  for (const { loop } of long) {
    chip($('loop-chips'), `${mainPhase(loop)} ${shortName(loopName(loop))}: ${roundsText(loop)}`, false, () => { enlarge(loop); return true; });
  }
  timelines.whole = new Timeline($('whole'), enlarge);
  timelines.round = new Timeline($('round'), enlarge);
  timelines.whole.show(spans, data.headline.seconds, always);
  $('loops').hidden = !long.length;
  if (long.length) enlarge([...long].sort((a, b) => b.loop.end - b.loop.start - a.loop.end + a.loop.start)[0].loop);
  $('groups').replaceChildren(...groups.map((group) => legendItem(groupColor(group), group ? shortName(group) : 'others, or no layer')), legendItem('', 'waiting for communication', 'hatched'));
}

function drawTimelines() {
  if (!timelines.whole) return;
  readColors();
  timelines.whole.draw();
  if (!$('loops').hidden) timelines.round.draw();
}
