// Sortable tables: time by layer, and collectives.

const FIRST_ROWS = 15;
const LIMITS = { compute: [165, 'products of matrices'], memory: [250, 'reading and writing memory'], overhead: [110, 'starting operations'], communication: [25, 'waiting for communication'] };
const limitColor = (limit) => `oklch(var(--area-l) var(--area-c) ${LIMITS[limit][0]})`;

// Draws rows, sorted by a column; a click on a heading sorts by it. `columns` are {name, value, text, left, cell}.
function drawTable(host, state, columns, rows) {
  const by = columns[state.sort], direction = state.rising ? 1 : -1;
  const compare = (a, b) => (typeof a === 'string' ? a.localeCompare(b) : a - b);
  const sorted = [...rows].sort((a, b) => direction * compare(by.value(a), by.value(b)));
  const table = make('table'), head = make('tr'), again = () => drawTable(host, state, columns, rows);
  columns.forEach((column, i) => {
    const cell = make('th', column.left ? '' : 'num'), button = make('button', '', `${column.name}${i === state.sort ? (state.rising ? ' ▴' : ' ▾') : ''}`);
    if (i === state.sort) cell.setAttribute('aria-sort', state.rising ? 'ascending' : 'descending');
    button.onclick = () => { state.rising = i === state.sort ? !state.rising : Boolean(column.left); state.sort = i; again(); };
    cell.append(button); head.append(cell);
  });
  table.append(head);
  for (const row of state.all ? sorted : sorted.slice(0, FIRST_ROWS)) {
    const line = make('tr');
    for (const column of columns) {
      const cell = make('td', column.left ? '' : 'num');
      cell.append(column.cell ? column.cell(row) : (column.text || column.value)(row));
      if (column.kind) { cell.className = column.kind(row); cell.title = column.title(row); }
      line.append(cell);
    }
    table.append(line);
  }
  host.replaceChildren(table);
  if (!rows.length) host.append(make('p', 'empty', 'Nothing matches. Clear the filter above.'));
  if (rows.length > FIRST_ROWS) {
    const more = make('button', 'more', state.all ? `Only the first ${FIRST_ROWS}` : `All ${rows.length}`);
    more.onclick = () => { state.all = !state.all; again(); };
    host.append(more);
  }
}

// Returns for each layer that passes the filter: seconds by limit, FLOPs and bytes of all executions in a step.
function timeByLayer() {
  const layers = new Map();
  const of = (layer) => {
    if (!layers.has(layer)) layers.set(layer, { layer, seconds: 0, products: 0, flops: 0, bytes: 0, compute: 0, memory: 0, overhead: 0, communication: 0 });
    return layers.get(layer);
  };
  for (const op of operations) {
    if (!matches(op.layer, op.phase, op.opcode)) continue;
    const entry = of(op.layer), seconds = op.count * op.seconds;
    entry[op.limit] += seconds; entry.seconds += seconds;
    entry.flops += op.count * op.flops; entry.bytes += op.count * op.bytes;
  }
  for (const c of collectives) {
    if (!matches(c.layer, c.phase, textOf(c))) continue;
    const entry = of(c.layer);
    entry.communication += c.count * c.exposed; entry.seconds += c.count * c.exposed;
  }
  return [...layers.values()].filter((entry) => entry.seconds > 0);
}

const layersTable = { sort: 2, rising: false, all: false };

function drawLayers() {
  const rows = timeByLayer(), total = data.headline.seconds, most = Math.max(...rows.map((row) => row.seconds), 1e-30);
  const bar = (row) => {
    const host = make('div', 'split');
    host.title = Object.keys(LIMITS).map((limit) => `${limit} ${seconds(row[limit])}`).join(', ');
    for (const limit of Object.keys(LIMITS)) {
      const part = make('span');
      part.style.cssText = `width:${(100 * row[limit]) / most}%;background:${limitColor(limit)}`;
      host.append(part);
    }
    return host;
  };
  drawTable($('layers'), layersTable, [
    { name: 'layer', left: true, value: (row) => row.layer || '(no layer)', cell: (row) => breakable('span', '', row.layer || '(no layer)') },
    { name: 'time', left: true, value: (row) => row.seconds, cell: bar },
    { name: 'seconds', value: (row) => row.seconds, text: (row) => seconds(row.seconds) },
    { name: 'share', value: (row) => row.seconds, text: (row) => percent(row.seconds / total) },
    { name: 'FLOPs', value: (row) => row.flops, text: (row) => short(row.flops) },
    { name: 'bytes', value: (row) => row.bytes, text: (row) => bytes(row.bytes) },
    { name: 'FLOPs/byte', value: (row) => row.flops / (row.bytes || 1), text: (row) => (row.flops && row.bytes ? short(row.flops / row.bytes) : '–') },
    { name: 'exposed communication', value: (row) => row.communication, text: (row) => seconds(row.communication) },
  ], rows);
  const share = rows.reduce((sum, row) => sum + row.seconds, 0) / total;
  $('layers-count').textContent = `${rows.length} layers, ${percent(share)} of the ${WORK}${share > 1.001 ? ', copies beside it included' : ''}`;
}

const collectivesTable = { sort: 9, rising: false, all: false, kinds: new Set(), axes: new Set(), surprises: false };
const axesText = (c) => c.axes.join(' + ') || '–';
// Returns the cause of a collective if the plan knows it: a reason and the declaring fields; for a surprise, also what
// happens and what to change.
const causeOf = (c) => c.cause || { reason: '', fields: [], what: '', remedy: '' };
const isSurprise = (c) => Boolean(causeOf(c).what);
const textOf = (c) => `${c.kind} ${axesText(c)} ${causeOf(c).reason} ${causeOf(c).fields.join(' ')}`;
const COLLECTIVE_COLUMNS = [
  { name: 'collective', left: true, value: (c) => c.kind },
  { name: 'over', left: true, value: axesText },
  { name: 'layer', left: true, value: (c) => c.layer || '(no layer)' },
  { name: 'phase', left: true, value: (c) => c.phase },
  { name: 'count', value: (c) => c.count, text: (c) => String(Number(c.count.toFixed(1))) },
  { name: 'devices', value: (c) => c.group_size, text: (c) => String(c.group_size) },
  { name: 'result', value: (c) => c.result_bytes, text: (c) => `${c.dtype} ${bytes(c.result_bytes)}` },
  { name: 'fast links', value: (c) => c.count * c.fast_bytes, text: (c) => bytes(c.count * c.fast_bytes) },
  { name: 'network', value: (c) => c.count * c.network_bytes, text: (c) => bytes(c.count * c.network_bytes) },
  { name: 'seconds', value: (c) => c.count * c.seconds, text: (c) => seconds(c.count * c.seconds) },
  { name: 'exposed', value: (c) => c.count * c.exposed, text: (c) => seconds(c.count * c.exposed) },
];
const CAUSE = {
  name: 'cause', left: true, value: (c) => causeOf(c).reason || '–', kind: (c) => (isSurprise(c) ? 'surprise' : ''),
  title: (c) => [causeOf(c).what, causeOf(c).remedy, causeOf(c).fields.length ? `declared by ${causeOf(c).fields.join(', ')}` : ''].filter(Boolean).join('\n'),
};

function drawCollectives() {
  const { kinds, axes } = collectivesTable;
  const rows = collectives.filter((c) => matches(c.layer, c.phase, textOf(c)) && (!kinds.size || kinds.has(c.kind)) && (!axes.size || axes.has(axesText(c))) && (!collectivesTable.surprises || isSurprise(c)));
  drawTable($('collectives'), collectivesTable, [...COLLECTIVE_COLUMNS, ...(collectives.some((c) => c.cause) ? [CAUSE] : [])], rows);
  const sum = (f) => rows.reduce((n, c) => n + c.count * f(c), 0);
  $('collectives-count').textContent = `${rows.length} of ${collectives.length}; each device sends ${bytes(sum((c) => c.fast_bytes))} over fast links, ${bytes(sum((c) => c.network_bytes))} over the network; ${seconds(sum((c) => c.seconds))}, of which ${seconds(sum((c) => c.exposed))} are exposed`;
}

function setUpTables() {
  for (const [host, chosen, value] of [['collective-kinds', collectivesTable.kinds, (c) => c.kind], ['collective-axes', collectivesTable.axes, axesText]]) {
    for (const name of [...new Set(collectives.map(value))].sort()) {
      chip($(host), name, false, () => {
        if (!chosen.delete(name)) chosen.add(name);
        drawCollectives();
        return chosen.has(name);
      });
    }
  }
  const surprises = collectives.filter(isSurprise).length;
  if (surprises) chip($('collective-causes'), `surprises ${surprises}`, false, () => { collectivesTable.surprises = !collectivesTable.surprises; drawCollectives(); return collectivesTable.surprises; });
}
