// The life of a run: a chart of its steps over time, where the time went, its hosts, its attempts and its events.

const COLORS = {
  'training': 'var(--training)', 'lost to restarts': 'oklch(0.58 0.17 25)', 'starting': 'oklch(0.70 0.10 80)', 'compiling': 'oklch(0.66 0.12 60)',
  'restoring': 'oklch(0.62 0.11 290)', 'saving': 'oklch(0.62 0.13 250)', 'evaluating': 'oklch(0.68 0.09 200)',
  'waiting for input': 'oklch(0.62 0.15 340)', 'hooks and traces': 'oklch(0.60 0.04 250)', 'no process ran': 'var(--whole)',
};
const KINDS = { lost: 'lost', 'save failed': 'lost', nonfinite: 'lost', 'went back': 'went', 'slow host': 'slow' };
const when = (time) => new Date(time * 1000).toISOString().slice(0, 19).replace('T', ' ');
const percent = (share) => `${(100 * share).toFixed(share >= 0.0995 ? 0 : 1)}%`;
const isBad = (attempt) => attempt.how === 'killed' || attempt.how.includes(':');
const number = (value) => value.toLocaleString('en');

function span(seconds) {
  if (seconds < 1) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

function stack(host, parts) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  for (const [name, value] of parts) {
    const part = make('span');
    part.style.setProperty('--fill', COLORS[name] || 'var(--soft)');
    part.style.width = `${(100 * value) / total}%`;
    part.onmousemove = (event) => showTip(event, [name, `${span(value)}, ${percent(value / total)}`]);
    part.onmouseleave = hideTip;
    host.append(part);
  }
}

// Returns round numbers in equal steps between 0 and `most`, about `parts` of them.
function roundMarks(most, parts, units) {
  const rough = most / parts, unit = units.find((each) => each >= rough) || 10 ** Math.ceil(Math.log10(rough));
  return Array.from({ length: Math.floor(most / unit + 1e-9) + 1 }, (_, i) => i * unit);
}

function drawMark(kind, x, y) {
  const d = kind === 'went' ? `M${x - 4},${y - 4}h8l-4,8z` : kind === 'slow' ? `M${x - 4},${y + 4}h8l-4,-8z` : `M${x - 4},${y - 4}l8,8m0,-8l-8,8`;
  return shape('path', { d, class: `mark ${kind}` });
}

function drawChart() {
  const svg = $('chart'), width = svg.clientWidth || 900, height = 260;
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  const { attempts } = data;
  if (!attempts.length) { svg.append(label('the history has no attempt', width / 2, height / 2, 'middle')); return; }
  const t0 = attempts[0].began, t1 = Math.max(attempts[attempts.length - 1].ended, t0 + 1), most = Math.max(1, ...attempts.map((each) => each.last));
  const left = 22 + 6.6 * number(most).length, right = width - 14, top = 12, bottom = height - 24;
  const X = (time) => left + ((right - left) * Math.min(Math.max(time - t0, 0), t1 - t0)) / (t1 - t0), Y = (step) => bottom - ((bottom - top) * step) / most;
  const steps = Array.from({ length: 40 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
  for (const step of roundMarks(most, 4, steps)) svg.append(shape('line', { class: 'grid', x1: left, x2: right, y1: Y(step), y2: Y(step) }), label(number(step), left - 6, Y(step) + 4, 'end'));
  const times = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];
  for (const time of roundMarks(t1 - t0, Math.max(2, Math.floor((right - left) / 110)), times)) svg.append(label(time ? span(time) : '0', X(t0 + time), height - 6, time === 0 ? 'start' : X(t0 + time) > right - 24 ? 'end' : 'middle'));
  attempts.forEach((attempt, i) => {
    if (i) svg.append(shape('rect', { class: 'gap', x: X(attempts[i - 1].ended), width: Math.max(X(attempt.began) - X(attempts[i - 1].ended), 0), y: top, height: bottom - top }));
    const points = [[attempt.began, attempt.first], ...attempt.saves.filter(([, step]) => step !== null), [attempt.ended, attempt.last]].sort((a, b) => a[0] - b[0]);
    svg.append(shape('polyline', { class: 'path', points: points.map(([time, step]) => `${X(time).toFixed(1)},${Y(step).toFixed(1)}`).join(' ') }));
    for (const [time, step] of attempt.saves) if (step !== null) svg.append(shape('line', { class: 'save', x1: X(time), x2: X(time), y1: Y(step) - 5, y2: Y(step) + 5 }));
    if (isBad(attempt)) svg.append(drawMark('lost', X(attempt.ended), Y(attempt.last)));
    const touch = shape('rect', { class: 'touch', x: X(attempt.began), width: Math.max(X(attempt.ended) - X(attempt.began), 3), y: top, height: bottom - top });
    touch.onmousemove = (event) => showTip(event, [`attempt ${i + 1}`, `${when(attempt.began)} UTC, ${span(attempt.ended - attempt.began)}`, `steps ${number(attempt.first)} to ${number(attempt.last)}`, `${attempt.processes} process${attempt.processes > 1 ? 'es' : ''}`, attempt.how]);
    touch.onmouseleave = hideTip;
    svg.append(touch);
  });
  const stepAt = (time) => { const own = attempts.filter((each) => each.began <= time).pop(); return own ? own.last : 0; };
  for (const event of data.events) if (KINDS[event.kind]) {
    const mark = drawMark(KINDS[event.kind], X(event.time), Y(event.step === null ? stepAt(event.time) : event.step));
    mark.onmousemove = (at) => showTip(at, [event.kind, event.text, `${when(event.time)} UTC`]);
    mark.onmouseleave = hideTip;
    svg.append(mark);
  }
}

function addMark(host, draw, text) {
  const item = make('span'), svg = shape('svg', { viewBox: '0 0 14 12' });
  svg.append(draw);
  item.append(svg, text);
  host.append(item);
}

function fillAttempts() {
  data.attempts.map((attempt, i) => [attempt, i]).reverse().forEach(([attempt, i]) => {
    const row = make('div', 'row'), bar = make('div', 'stack');
    stack(bar, attempt.seconds);
    const next = data.attempts[i + 1];
    const lost = next && next.first < attempt.last ? `, ${number(attempt.last - next.first)} lost` : '';
    row.append(make('span', 'num', String(i + 1)), make('span', 'num', when(attempt.began)), make('span', 'num', span(attempt.ended - attempt.began)),
      make('span', 'num steps', `${number(attempt.first)} to ${number(attempt.last)}${lost}`), bar, make('span', isBad(attempt) ? 'how bad' : 'how soft', attempt.how || 'goes on'));
    $('attempts').append(row);
  });
  if (!data.attempts.length) $('attempts').append(make('p', 'empty', 'This run was trained by a version without a history.'));
}

function fillHosts() {
  const known = data.hosts.filter((host) => host.product > 0);
  $('hosts-section').hidden = known.length < 2;
  if (known.length < 2) return;
  const most = Math.max(...known.map((host) => host.product));
  $('hosts-about').textContent = `a test product on their devices, the slowest first${data.numHosts > known.length ? `; ${known.length} of ${number(data.numHosts)}` : ''}`;
  for (const host of known) {
    const row = make('div', 'row'), bar = make('div', 'bar'), fill = make('span');
    fill.style.width = `${(100 * host.product) / most}%`;
    fill.style.setProperty('--fill', host.ratio > 1.5 ? 'var(--bad)' : 'var(--training)');
    bar.append(fill);
    row.append(make('span', '', `process ${host.process}, ${host.host}`), bar, make('span', 'num', `${span(host.product)}, ${host.ratio.toFixed(2)} x`),
      make('span', 'num soft', `step ${span(host.median)}, 90% ${span(host.p90)}`), make('span', 'num soft', `${percent(host.waited)} waiting`));
    $('hosts').append(row);
  }
}

const hidden = new Set(['saved']);
function fillEvents() {
  const shown = data.events.filter((event) => !hidden.has(event.kind)).reverse();
  $('events').replaceChildren(...shown.slice(0, 500).map((event) => {
    const row = make('div', 'row');
    row.append(make('span', 'num soft', when(event.time)), make('span', KINDS[event.kind] === 'lost' ? 'bad' : '', event.kind),
      make('span', 'num soft', event.step === null ? '' : `step ${number(event.step)}`), make('span', 'text', event.text));
    return row;
  }));
  if (!shown.length) $('events').append(make('p', 'empty', 'No event of these kinds.'));
}

$('title').textContent = data.title;
$('about').textContent = data.lines.join(' ');
const first = data.attempts[0], last = data.attempts[data.attempts.length - 1];
const lostSteps = data.attempts.reduce((sum, each, i) => sum + (data.attempts[i + 1] ? Math.max(each.last - data.attempts[i + 1].first, 0) : 0), 0);
const totals = [['step', data.steps ? `${number(data.step)} of ${number(data.steps)}` : number(data.step)], ['goodput', percent(data.goodput)], ['attempts', String(data.attempts.length)],
  ['steps lost', number(lostSteps)], ['processes', number(data.processes)], ...(first ? [['since the start', span(last.ended - first.began)]] : [])];
for (const [name, value] of totals) { const item = make('div'); item.append(make('dt', '', name), make('dd', '', value)); $('totals').append(item); }
if (first) $('chart-about').textContent = `from ${when(first.began)} UTC`;
addMark($('marks'), shape('path', { d: 'M0,6h14', class: 'path', stroke: 'var(--training)', 'stroke-width': 2 }), 'steps of an attempt');
addMark($('marks'), shape('path', { d: 'M7,0v12', stroke: 'var(--save)' }), 'saved');
addMark($('marks'), drawMark('lost', 7, 6), 'killed, lost or failed');
addMark($('marks'), drawMark('went', 7, 6), 'went back');
addMark($('marks'), drawMark('slow', 7, 6), 'slow host');
addMark($('marks'), shape('rect', { x: 1, y: 0, width: 12, height: 12, fill: 'var(--shade)' }), 'no process ran');
const parts = [...data.seconds, ...(data.between > 0 ? [['no process ran', data.between]] : [])].sort((a, b) => b[1] - a[1]);
const all = parts.reduce((sum, [, value]) => sum + value, 0);
$('spent-about').textContent = `${span(all)}, over all attempts`;
stack($('spent'), parts);
for (const [name, value] of parts) {
  const item = make('span'), dot = make('i');
  dot.style.background = COLORS[name] || 'var(--soft)';
  item.append(dot, `${name} ${percent(value / (all || 1))}`);
  $('causes').append(item);
}
for (const kind of [...new Set(data.events.map((event) => event.kind))].sort()) {
  chip($('kinds'), kind, !hidden.has(kind), () => { if (!hidden.delete(kind)) hidden.add(kind); fillEvents(); return !hidden.has(kind); });
}
fillAttempts();
fillHosts();
fillEvents();
addEventListener('resize', drawChart);
setUpTheme(drawChart);
drawChart();
