// The page of the cheapest run: a picture of time against money, and a table of the offers.

const HUES = [165, 70, 250, 320, 25, 205, 110, 285, 45];
const chipKinds = [...new Set(data.options.map((option) => option.kind))].sort();
const colorOf = (kind) => `oklch(0.62 0.15 ${HUES[chipKinds.indexOf(kind) % HUES.length]})`;
const fillOf = (option) => (option.isCompiled ? colorOf(option.kind) : 'var(--panel)');
// Powers of ten and their double and fivefold in a range.
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) found.push(...[1, 2, 5].map((n) => n * 10 ** power));
  return found.filter((n) => n >= low && n <= high);
}
const TIMES = [60, 300, 1200, 3600, 3 * 3600, 8 * 3600, 86400, 2 * 86400, 5 * 86400, 10 * 86400, 20 * 86400, 50 * 86400, 100 * 86400, 365 * 86400, 1000 * 86400, 3650 * 86400];
function timeText(s) {
  if (s < 3600) return `${Math.round(s / 60)} min`;
  return s < 86400 ? `${Number((s / 3600).toPrecision(3))} h` : `${Number((s / 86400).toPrecision(3)).toLocaleString('en')} d`;
}

function tipOfOption(option) {
  const most = (text) => (text ? `, at most ${text}` : '');
  return [option.name, `${option.timeText}${most(option.timeMost)}`, `${option.moneyText} in money${most(option.moneyMost)}`, `a step takes ${(option.step * 1000).toPrecision(3)} ms, ${bytes(option.memory)} on each device`, option.setting, option.how];
}

function drawPicture() {
  const svg = $('picture'), width = svg.clientWidth || 800, height = width < 560 ? 320 : 420;
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const most = (option) => (option.factors ? option.factors[1] : 1);
  const range = (values) => [Math.min(...values) / 1.25, Math.max(...values) * 1.25];
  const limits = (value) => (value === null ? [] : [value]);
  const [x0, x1] = range([...data.options.flatMap((o) => [o.seconds, o.seconds * most(o)]), ...limits(data.seconds)]);
  const [y0, y1] = range([...data.options.flatMap((o) => [o.money, o.money * most(o)]), ...limits(data.budget)]);
  const plot = { left: 58, right: width - 14, top: 12, bottom: height - 38 };
  const at = (value, low, high, from, to) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
  const X = (x) => at(x, x0, x1, plot.left, plot.right), Y = (y) => at(y, y0, y1, plot.bottom, plot.top);

  let free = -Infinity;
  for (const x of TIMES.filter((x) => x >= x0 && x <= x1)) {
    svg.append(shape('line', { class: 'grid', x1: X(x), x2: X(x), y1: plot.top, y2: plot.bottom }));
    if (X(x) - free > 44) { svg.append(label(timeText(x), X(x), plot.bottom + 14, 'middle')); free = X(x); }
  }
  for (const y of logTicks(y0, y1)) svg.append(shape('line', { class: 'grid', x1: plot.left, x2: plot.right, y1: Y(y), y2: Y(y) }), label(y.toLocaleString('en'), plot.left - 6, Y(y) + 4, 'end'));
  svg.append(label('time of the run', (plot.left + plot.right) / 2, height - 6, 'middle'), label('money', plot.left + 4, plot.top + 10, 'start'));
  if (data.seconds !== null) svg.append(shape('line', { class: 'limit', x1: X(data.seconds), x2: X(data.seconds), y1: plot.top, y2: plot.bottom }), label('deadline', X(data.seconds) - 4, plot.top + 10, 'end', 'limit'));
  if (data.budget !== null) svg.append(shape('line', { class: 'limit', x1: plot.left, x2: plot.right, y1: Y(data.budget), y2: Y(data.budget) }), label('budget', plot.right - 4, Y(data.budget) - 4, 'end', 'limit'));
  const unbeaten = data.options.filter((option) => option.isUnbeaten);
  svg.append(shape('polyline', { class: 'unbeaten', points: unbeaten.map((o) => `${X(o.seconds)},${Y(o.money)}`).join(' ') }));
  const names = [];
  for (const option of data.options) {
    const [x, y] = [X(option.seconds), Y(option.money)];
    if (option.factors) {
      const line = shape('line', { class: 'range', x1: X(option.seconds * option.factors[0]), y1: Y(option.money * option.factors[0]), x2: X(option.seconds * option.factors[1]), y2: Y(option.money * option.factors[1]) });
      line.style.stroke = colorOf(option.kind);
      svg.append(line);
    }
    const circle = shape('circle', { cx: x, cy: y, r: option.isBest ? 7 : 5, class: option.isBest ? 'best' : '' });
    circle.style.fill = fillOf(option);
    if (!option.isBest) circle.style.stroke = colorOf(option.kind);
    circle.onmousemove = (event) => showTip(event, tipOfOption(option));
    circle.onmouseleave = hideTip;
    svg.append(circle);
    if (option.isUnbeaten || option.isBest) names.push([option.name, x, y]);
  }
  const placed = [];
  for (const [text, x, y] of names) {
    const w = text.length * 6.2, left = Math.max(plot.left, Math.min(x - w / 2, plot.right - w));
    const top = [y + 18, y - 12, y + 31, y - 25].find((row) => row > plot.top && row < plot.bottom && placed.every((o) => left + w < o.left || o.left + o.w < left || Math.abs(o.row - row) > 12));
    if (top === undefined) continue;
    placed.push({ left, w, row: top });
    svg.append(label(text, left, top, 'start', 'name'));
  }
}

function drawLegend() {
  const item = (color, text, fill) => {
    const part = make('span'), swatch = make('i');
    swatch.style.cssText = `background:${fill};border:2px solid ${color};border-radius:50%`;
    part.append(swatch, text);
    return part;
  };
  $('kinds').replaceChildren(
    ...chipKinds.map((kind) => item(colorOf(kind), kind, colorOf(kind))),
    item('var(--soft)', 'compiled', 'var(--soft)'),
    item('var(--soft)', 'only estimated', 'var(--panel)'),
  );
}

const COLUMNS = [
  ['chips', (o) => o.name, true], ['time', (o) => o.timeText], ['at most', (o) => o.timeMost], ['money', (o) => o.moneyText], ['at most', (o) => o.moneyMost],
  ...(data.hasGoal ? [['goal', (o) => o.reached, true]] : []), ['step', (o) => (o.step >= 1 ? `${o.step.toPrecision(3)} s` : `${(o.step * 1000).toPrecision(3)} ms`)], ['memory', (o) => bytes(o.memory)], ['known', (o) => o.how, true], ['mesh, and what else differs', (o) => o.setting, true],
];

function drawOffers() {
  const table = make('table'), head = make('tr');
  head.append(...COLUMNS.map(([name, , left]) => make('th', left ? '' : 'num', name)));
  table.append(head);
  for (const option of data.options) {
    const row = make('tr', option.isBest ? 'best' : '');
    row.append(...COLUMNS.map(([, text, left]) => make('td', left ? '' : 'num', text(option))));
    table.append(row);
  }
  $('table').replaceChildren(table);
  $('count').textContent = `${data.options.length}, of which ${data.options.filter((option) => option.isCompiled).length} compiled`;
}

function setUp() {
  $('title').textContent = data.title;
  $('goal').textContent = data.goal;
  $('lines').replaceChildren(...data.verdict.map((line) => make('li', '', line)));
  $('reasons').replaceChildren(...data.leftOut.map((line) => make('li', '', line)));
  $('left-out').hidden = !data.leftOut.length;
  const best = data.options.find((option) => option.isBest);
  for (const [name, value, most] of best ? [['chips', best.name, best.how], ['time', best.timeText, best.timeMost], ['money', best.moneyText, best.moneyMost]] : []) {
    const item = make('div', best.reached.startsWith('no') && name !== 'chips' ? 'bad' : ''), dd = make('dd', '', value);
    if (most) dd.append(' ', make('small', '', name === 'chips' ? most : `at most ${most}`));
    item.append(make('dt', '', name), dd);
    $('totals').append(item);
  }
  drawLegend();
  drawOffers();
  const draw = () => { if (data.options.length) drawPicture(); };
  addEventListener('resize', draw);
  setUpTheme(draw);
  draw();
}

setUp();
