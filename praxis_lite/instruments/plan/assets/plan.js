// The page of a plan: its headline, the filter, and colours of layers. The other scripts draw the pictures.

const operations = data.operations.map(([name, layer, phase, opcode, count, flops, size, secs, limit]) => ({ name, layer, phase, opcode, count, flops, bytes: size, seconds: secs, limit }));
const collectives = data.collectives;
const PHASES = ['forward', 'recomputed', 'backward', 'update', 'prompts', 'tokens', 'other'];
// What is planned: 'step', or 'program', which decodes.
const WORK = data.headline.work;
const filter = { words: [], phases: new Set() };

const percent = (share) => `${(100 * share).toFixed(1)} %`;
// Returns '989 T' for 9.89e14.
function short(n) {
  const units = ['', ' K', ' M', ' G', ' T', ' P', ' E', ' Z', ' Y'];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i++; }
  return `${n >= 100 ? n.toFixed(0) : Number(n.toPrecision(3))}${units[i]}`;
}
const count = (n) => short(n).replace('G', 'B');
function seconds(s) {
  for (const [factor, unit] of [[1, 's'], [1e3, 'ms']]) if (s * factor >= 0.9995) return `${Number((s * factor).toPrecision(3))} ${unit}`;
  return s ? `${Number((s * 1e6).toPrecision(3))} µs` : '0';
}
function legendItem(color, text, kind = '') {
  const item = make('span'), swatch = make('i', kind);
  if (!kind) swatch.style.background = color;
  item.append(swatch, text);
  return item;
}

// Whether something passes the filter: it has one of the chosen phases, and its texts contain every word.
function matches(layer, phase, text) {
  if (filter.phases.size && phase && !filter.phases.has(phase)) return false;
  const all = `${layer} ${phase} ${text}`.toLowerCase();
  return filter.words.every((word) => all.includes(word));
}

// ---------------------------------------------------------------- groups of layers, by colour

const GROUP_HUES = [165, 70, 250, 320, 25, 205, 110, 285, 45];

// Returns a few groups of layers. It repeatedly divides the group that takes most time into the layers below it. Layers
// that take less than a hundredth of the time are in the group ''.
function groupsOfLayers() {
  const tree = { path: '', own: 0, total: 0, children: new Map() };
  const add = (layer, secs) => {
    let node = tree;
    node.total += secs;
    for (const part of layer.split('.').filter(Boolean)) {
      if (!node.children.has(part)) node.children.set(part, { path: node.path ? `${node.path}.${part}` : part, own: 0, total: 0, children: new Map() });
      node = node.children.get(part);
      node.total += secs;
    }
    node.own += secs;
  };
  for (const op of operations) add(op.layer, op.count * op.seconds);
  for (const c of collectives) add(c.layer, c.count * c.seconds);
  const counts = (node) => node.total > tree.total / 100;
  const divided = (node) => [{ ...node, total: node.own, children: new Map() }, ...node.children.values()].filter(counts);
  let found = [tree];
  for (;;) {
    const fits = (node) => found.length - 1 + divided(node).length <= GROUP_HUES.length;
    const largest = found.filter((node) => node.children.size && fits(node)).sort((a, b) => b.total - a.total)[0];
    if (!largest) break;
    found = [...found.filter((node) => node !== largest), ...divided(largest)];
  }
  const paths = found.sort((a, b) => b.total - a.total).map((node) => node.path).filter(Boolean);
  return [...paths, ''];
}

const groups = groupsOfLayers();
const groupCache = new Map();
function groupOf(layer) {
  if (!groupCache.has(layer)) groupCache.set(layer, groups.filter((g) => layer === g || layer.startsWith(`${g}.`)).sort((a, b) => b.length - a.length)[0] || '');
  return groupCache.get(layer);
}
const groupHue = (group) => (group ? GROUP_HUES[groups.indexOf(group) % GROUP_HUES.length] : null);
const groupColor = (group) => (group ? `oklch(var(--area-l) var(--area-c) ${groupHue(group)})` : 'var(--whole)');
// The common prefix of most paths, which short names omit: 'lm.transformer.layers.attention.out' is 'attention.out'.
const prefix = (() => {
  const paths = [...new Set(operations.filter((op) => op.flops && op.layer).map((op) => op.layer))].map((layer) => layer.split('.'));
  const counts = new Map();
  for (const path of paths) for (let i = 1; i < path.length; i++) { const p = `${path.slice(0, i).join('.')}.`; counts.set(p, (counts.get(p) || 0) + 1); }
  return [...counts].filter(([, n]) => n > 0.75 * paths.length).map(([p]) => p).sort((a, b) => b.length - a.length)[0] || '';
})();
const shortName = (layer) => (layer ? (prefix && layer.startsWith(prefix) ? layer.slice(prefix.length) : layer) : '(no layer)');

// ---------------------------------------------------------------- headline

function modelText(h) {
  if (h.requests) return h.requests;
  return `${count(h.parameters)} parameters${h.active === h.parameters ? '' : ` (${count(h.active)} active for each token)`}`;
}
function stepItem(h) {
  return h.isTimeKnown ? ['a step', seconds(h.seconds), h.range ? `likely ${h.range.map(seconds).join(' to ')}` : ''] : ['a step', 'not known', 'see the notes'];
}

function drawHeadline() {
  const h = data.headline, m = data.memory, total = $('totals');
  $('title').textContent = data.title;
  $('chips').textContent = `${modelText(h)} on ${h.topology}: ${h.chips}`;
  for (const place of document.querySelectorAll('.work')) place.textContent = WORK;
  $('mode').textContent = `mesh ${h.mesh}; ${h.modeText}`;
  const room = Math.abs(m.capacity - m.peak);
  const items = [
    [h.fits ? 'fits' : 'does not fit', h.refused ? `over ${bytes(m.capacity)}` : `${bytes(m.peak)} of ${bytes(m.capacity)}`, h.refused ? '' : `${bytes(room)} ${h.fits ? 'left' : 'too much'}`],
    ...(h.times ? h.times.map(([name, secs, range, more]) => [name, seconds(secs), [range ? `likely ${range.map(seconds).join(' to ')}` : '', more].filter(Boolean).join('; ')]) : [stepItem(h)]),
  ];
  if (h.isTimeKnown && h.mfu !== undefined) {
    items.push(h.causalMfu === null ? ['MFU', percent(h.mfu), ''] : ['MFU, 6N + 12LdS', percent(h.mfu), `${percent(h.causalMfu)} causal, 6N + 6LdS`]);
  }
  items.push(...(h.more || []));
  if (h.tokens && h.isTimeKnown) items.splice(2, 0, ['tokens a second', Math.round(h.tokensPerSecond).toLocaleString('en'), `${Math.round(h.tokensPerSecond / h.numChips).toLocaleString('en')} a chip`]);
  for (const [name, value, more] of items) {
    const item = make('div', name === 'does not fit' ? 'bad' : '');
    item.append(make('dt', '', name), make('dd', '', value));
    if (more) item.append(make('dd', 'more', more));
    total.append(item);
  }
  $('bottleneck').textContent = h.isTimeKnown ? `Bottleneck: ${h.bottleneck}.` : '';
  const isCompiled = data.schedule.length > 0;
  $('layers-roofline').hidden = !isCompiled;
  const missing = isCompiled ? [] : ['no timeline and no roofline: they need the schedule that the compiler of the chips makes'];
  $('notes').replaceChildren(...[...data.notes, ...missing, figures()].map((note) => make('li', '', note)));
  const shares = Object.entries(data.limits).filter(([, secs]) => secs > 0);
  $('shares-legend').replaceChildren(...shares.map(([limit, secs]) => legendItem(limitColor(limit), `${limit}, ${LIMITS[limit][1]}: ${seconds(secs)}, ${percent(secs / h.seconds)}`)));
}

// Returns the basis of the times: the published figures of a device, and the shares of them that programs reach.
function figures() {
  const { name, peaks, bandwidth, link, network, source, efficiency: e } = data.chip;
  const parts = [`${short(peaks.bf16)} FLOP/s in bf16 × ${e.compute}`, `memory ${short(bandwidth)}B/s × ${e.memory}`, `links ${short(link)}B/s × ${e.links}`, `network ${short(network)}B/s × ${e.network}`];
  return `${name}: ${parts.join(', ')} (${source}; the shares are ${e.calibrated ? `measured: ${e.calibrated}` : 'assumed'})`;
}

function drawShares() {
  const svg = $('shares'), width = svg.clientWidth || 800, sum = Object.values(data.limits).reduce((a, b) => a + b, 0);
  svg.replaceChildren();
  svg.setAttribute('class', 'strip');
  svg.setAttribute('viewBox', `0 0 ${width} 18`);
  svg.style.height = '18px';
  let x = 0;
  for (const [limit, secs] of Object.entries(data.limits)) {
    const w = (width * secs) / sum, rect = shape('rect', { x, y: 0, width: Math.max(w - 1, 0), height: 18, rx: 2 });
    rect.style.fill = limitColor(limit);
    svg.append(rect);
    if (w > 40) svg.append(label(fit(`${limit} ${percent(secs / data.headline.seconds)}`, w - 10), x + 5, 13, 'start'));
    x += w;
  }
}

// ---------------------------------------------------------------- all of it

function draw() { drawShares(); drawMemory(); drawTimelines(); drawLayers(); drawRoofline(); drawCollectives(); }

function setUp() {
  drawHeadline();
  setUpMemory(); setUpTimelines(); setUpTables();
  const present = PHASES.filter((phase) => [...operations, ...collectives].some((what) => what.phase === phase));
  for (const phase of present) {
    chip($('phases'), phase, false, () => {
      if (!filter.phases.delete(phase)) filter.phases.add(phase);
      draw();
      return filter.phases.has(phase);
    });
  }
  $('search').oninput = () => { filter.words = $('search').value.toLowerCase().split(/\s+/).filter(Boolean); draw(); };
  addEventListener('keydown', (event) => {
    if (event.key === '/' && document.activeElement !== $('search')) { event.preventDefault(); $('search').focus(); }
    if (event.key === 'Escape') { $('search').value = ''; filter.words = []; memory.zoom = []; hideTip(); draw(); }
  });
  addEventListener('resize', draw);
  setUpTheme(draw);
}

setUp();
