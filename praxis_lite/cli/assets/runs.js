// The curves of the runs of each group, and a table of them, which can be sorted.

let wanted = '', isLog = false;
const color = (index, count) => `oklch(0.62 0.15 ${Math.round((250 + (index * 360) / Math.max(count, 6)) % 360)})`;
const isShown = (run) => !wanted || [run.name, ...run.fields].join(' ').toLowerCase().includes(wanted);
const short = (value) => (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3) ? value.toExponential(3) : String(Number(value.toPrecision(5))));

function matches(pattern, name) {
  const parts = pattern.split('*');
  return parts.length === 1 ? name === pattern : name.startsWith(parts[0]) && name.endsWith(parts[parts.length - 1]);
}

// Returns marks of an axis, [value, label]: round numbers in equal steps, from at most `low` to at least `high`, in about
// `parts` parts of at least `least`. All labels have the decimals that tell neighbours apart; those of whole numbers have none.
function evenMarks(low, high, parts, least = 0) {
  const rough = Math.max((high - low) / parts, least), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9), digits = Math.floor(Math.log10(step) + 1e-9);
  const most = Math.max(Math.abs(first), Math.abs(last)) * step, decimals = Math.max(-digits, 0);
  const text = (value) => {
    if (least === 1 || (most < 1e6 && decimals <= 7)) return value.toLocaleString('en', { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
    return value === 0 ? '0' : value.toExponential(Math.max(Math.floor(Math.log10(Math.abs(value)) + 1e-9) - digits, 0));
  };
  return Array.from({ length: last - first + 1 }, (_, i) => [(first + i) * step, text((first + i) * step)]);
}

// Returns marks between two positive values for a logarithmic axis: powers of 10, and if these are few, also 2 and 5 times these.
function logMarks(low, high) {
  const decades = Math.log10(high / low), every = Math.ceil(decades / 7), found = [];
  for (let power = Math.floor(Math.log10(low) / every) * every; 10 ** power <= high; power += every) for (const factor of decades > 3 ? [1] : [1, 2, 5]) {
    const value = Number(`${factor}e${power}`);
    if (value >= low && value <= high) found.push([value, value >= 1e6 || value < 1e-3 ? value.toExponential() : value.toLocaleString('en')]);
  }
  return found.length > 2 ? found : evenMarks(low, high, 4).filter(([value]) => value >= low && value <= high);
}

function highlight(section, run) {
  section.classList.toggle('some', run !== null);
  for (const element of section.querySelectorAll('[data-run]')) element.classList.toggle('on', element.dataset.run === String(run));
}

function drawChart(section, group, svg, pattern) {
  const width = svg.clientWidth || 500, height = 240, plot = { right: width - 10, top: 8, bottom: height - 22 };
  const lines = group.runs.flatMap((run, index) => Object.entries(run.curves)
    .filter(([name]) => matches(pattern, name) && isShown(run))
    .map(([name, points]) => ({ run, index, name, points: points.filter(([, y]) => !isLog || y > 0) }))).filter((line) => line.points.length);
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  const all = lines.flatMap((line) => line.points);
  if (!all.length) { svg.append(label('no values', width / 2, height / 2, 'middle')); return; }
  const x1 = Math.max(...all.map(([x]) => x), 1), bounds = [Math.min(...all.map(([, y]) => y)), Math.max(...all.map(([, y]) => y))];
  if (bounds[0] === bounds[1]) { bounds[0] -= Math.abs(bounds[0]) * 0.1 || 1; bounds[1] += Math.abs(bounds[1]) * 0.1 || 1; }
  const marks = isLog ? logMarks(...bounds) : evenMarks(...bounds, 4);
  if (!isLog) bounds.splice(0, 2, marks[0][0], marks[marks.length - 1][0]);
  plot.left = 16 + 6.5 * Math.max(...marks.map(([, text]) => text.length));
  const scale = isLog ? Math.log : (y) => y, [y0, y1] = bounds.map(scale);
  const X = (x) => plot.left + ((plot.right - plot.left) * x) / x1, Y = (y) => plot.bottom - ((plot.bottom - plot.top) * (scale(y) - y0)) / (y1 - y0);
  for (const [y, text] of marks) svg.append(shape('line', { class: 'grid', x1: plot.left, x2: plot.right, y1: Y(y), y2: Y(y) }), label(text, plot.left - 6, Y(y) + 4, 'end'));
  const room = (plot.right - plot.left) / (24 + 7 * x1.toLocaleString('en').length);
  for (const [x, text] of evenMarks(0, x1, Math.max(Math.min(room, 5), 1), 1)) if (x <= x1) svg.append(label(text, X(x), height - 6, x === 0 ? 'start' : X(x) > plot.right - 20 ? 'end' : 'middle'));
  for (const line of [...lines].reverse()) {
    const path = line.points.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join(' ');
    const parts = line.points.length > 1 ? [shape('polyline', { points: path })] : [shape('circle', { cx: X(line.points[0][0]), cy: Y(line.points[0][1]), r: 3 })];
    const touch = shape('polyline', { points: path, class: 'touch' }), all = shape('g', { class: 'line', 'data-run': line.index });
    all.style.setProperty('--of-run', color(line.index, group.runs.length));
    all.append(...parts, touch);
    all.onmousemove = (event) => {
      const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) * width) / box.width;
      const [x, y] = line.points.reduce((near, point) => (Math.abs(X(point[0]) - at) < Math.abs(X(near[0]) - at) ? point : near));
      showTip(event, [line.run.name, `${line.name} ${short(y)} at step ${Math.round(x).toLocaleString('en')}`, ...group.columns.map((name, i) => line.run.fields[i] && `${name} = ${line.run.fields[i]}`).slice(0, 6)]);
      highlight(section, line.index);
    };
    all.onmouseleave = () => { hideTip(); highlight(section, null); };
    svg.append(all);
  }
}

const FEW = 5 + 8;  // Columns of a table: of the run itself, and the fields that matter most.

function makeTable(section, group) {
  const table = make('table'), head = make('tr'), body = make('tbody'), scroll = make('div', 'scroll');
  const columns = ['run', 'step', 'age', 'loss', 'best', ...group.columns];
  const rows = group.runs.map((run, index) => ({ run, index, cells: [run.name, run.step, run.age, run.loss, run.best ? `${run.best[0]} @${run.best[1]}` : '-', ...run.fields] }));
  const isNumber = (text) => /^-?[\d.]+(e[+-]?\d+)?( @\d+)?$/.test(text);
  const isRight = columns.map((_, i) => (i > 0 && i < 5) || rows.every(({ cells }) => !cells[i] || isNumber(cells[i])));
  const kind = (i) => `${isRight[i] ? 'num' : ''}${i < FEW ? '' : ' more'}`;
  const place = (order) => body.replaceChildren(...order.filter(({ run }) => isShown(run)).map(({ run, index, cells }) => {
    const row = make('tr');
    row.dataset.run = index;
    row.style.setProperty('--of-run', color(index, group.runs.length));
    row.append(...cells.map((text, i) => make('td', kind(i), text || '-')));
    columns.forEach((name, i) => { row.children[i].dataset.column = name; });
    row.firstChild.prepend(make('i', 'swatch'));
    row.onmouseenter = () => highlight(section, index);
    row.onmouseleave = () => highlight(section, null);
    return row;
  }));
  columns.forEach((name, i) => {
    const cell = make('th', kind(i)), button = make('button', '', name);
    button.onclick = () => {
      const isUp = cell.getAttribute('aria-sort') === 'ascending';
      for (const other of head.children) other.removeAttribute('aria-sort');
      cell.setAttribute('aria-sort', isUp ? 'descending' : 'ascending');
      const value = ({ cells }) => (isNumber(cells[i]) ? parseFloat(cells[i]) : cells[i]);
      rows.sort((a, b) => (isUp ? -1 : 1) * (typeof value(a) === 'number' && typeof value(b) === 'number' ? value(a) - value(b) : String(value(a)).localeCompare(String(value(b)), 'en', { numeric: true })));
      place(rows);
    };
    cell.append(button);
    head.append(cell);
  });
  const top = make('thead');
  top.append(head);
  table.append(top, body);
  if (columns.length > FEW) {
    table.classList.add('few');
    chip(scroll, `all ${group.columns.length} fields`, false, () => !table.classList.toggle('few'));
  }
  scroll.append(table);
  place(rows);
  return { scroll, update: () => place(rows) };
}

function makeGroup(group) {
  const section = make('section'), title = make('h2', '', group.title), charts = make('div', 'charts'), redraw = [];
  title.append(make('small', '', ` ${group.runs.length} run${group.runs.length > 1 ? 's' : ''}; best: ${group.mode === 'min' ? 'lowest' : 'highest'} ${group.metric}`));
  const names = [...new Set(group.runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const known = names.includes(group.metric) || !names.some((name) => matches(group.metric, name)) ? names : [group.metric, ...names];
  for (const first of [...new Set([group.metric, 'train/loss'])].filter((name) => known.includes(name))) {
    const chart = make('div', 'chart'), head = make('h3'), choice = make('select'), svg = shape('svg', { role: 'img', 'aria-label': `${first} by step` });
    choice.setAttribute('aria-label', 'Metric');
    choice.append(...known.map((name) => { const option = make('option', '', name); option.value = name; option.selected = name === first; return option; }));
    head.append(choice, ' by step');
    chart.append(head, svg);
    charts.append(chart);
    redraw.push(() => drawChart(section, group, svg, choice.value));
    choice.onchange = redraw[redraw.length - 1];
  }
  const { scroll, update } = makeTable(section, group);
  section.append(title, charts, scroll);
  $('groups').append(section);
  return () => { section.hidden = !group.runs.some(isShown); redraw.forEach((draw) => draw()); update(); };
}

$('title').textContent = data.title;
const runs = data.groups.flatMap((group) => group.runs);
$('about').textContent = `${runs.length} run${runs.length > 1 ? 's' : ''} in ${data.groups.length} group${data.groups.length > 1 ? 's' : ''}`;
const updates = data.groups.map(makeGroup), update = () => updates.forEach((each) => each());
chip($('scale'), 'log scale', false, () => { isLog = !isLog; update(); return isLog; });
$('search').oninput = () => { wanted = $('search').value.toLowerCase(); update(); };
addEventListener('keydown', (event) => { if (event.key === '/' && event.target !== $('search')) { event.preventDefault(); $('search').focus(); } });
addEventListener('resize', update);
setUpTheme();
update();
