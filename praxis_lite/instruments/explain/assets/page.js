'use strict';
// The page: filters, the layer tree, the treemap, and the selected array.

const KINDS = { parameter: 'Parameters', slot: 'Optimizer slots', activation: 'Activations', input: 'Inputs' };
// The size of an array that the compiler places is not known, so the array has no area.
const weight = (a) => (a.free ? 0 : a.local);
const state = { kinds: new Set(['parameter', 'slot']), search: '', whole: false, padded: false, color: 'split', zoom: [], selected: null, closed: new Set() };

const splitName = (a) => (a.free ? 'left to the compiler' : a.dims.map((d) => d[1].filter((x) => sizeOf[x] > 1).join('+')).filter(Boolean).join(', ') || 'replicated on every device');
const sizeOf = Object.fromEntries(data.mesh);
const numDevices = data.mesh.reduce((n, [, size]) => n * size, 1);
const partsOf = (a) => (a.free ? 0 : a.dims.reduce((n, d) => n * d[2], 1));
const axesOf = (a) => [...new Set(a.dims.flatMap((d) => d[1]).filter((x) => sizeOf[x] > 1))].sort();
const groupName = (a) => (state.color === 'kind' ? KINDS[a.kind] : a.free ? 'left to the compiler' : axesOf(a).join(' + ') || 'not split');
const groups = {};
for (const mode of ['split', 'kind']) {
  state.color = mode;
  groups[mode] = mode === 'kind' ? Object.values(KINDS) : [...new Set(data.arrays.map(groupName))];
}
const HUES = [250, 165, 70, 320, 25, 205, 110, 285];
state.color = numDevices > 1 ? 'split' : 'kind';

function colorOf(a) {
  const name = groupName(a);
  if (name === 'not split') return 'var(--whole)';
  if (name === 'left to the compiler') return 'var(--hover)';
  const names = groups[state.color].filter((n) => n !== 'not split' && n !== 'left to the compiler');
  return `oklch(var(--area-l) var(--area-c) ${HUES[names.indexOf(name) % HUES.length]})`;
}

function visible() {
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  return data.arrays.filter((a) => {
    if (!state.kinds.has(a.kind)) return false;
    if (state.whole && (a.free || axesOf(a).length)) return false;
    if (state.padded && !a.waste) return false;
    const text = `${a.path} ${a.kind} ${a.dtype} ${splitName(a)} ${a.why}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function treeOf(arrays) {
  const root = { name: '', path: [], children: [], byName: new Map(), value: 0, count: 0 };
  for (const array of arrays) {
    let node = root;
    node.value += weight(array); node.count++;
    array.place.forEach((name, i) => {
      const last = i === array.place.length - 1;
      let child = last ? null : node.byName.get(name);
      if (!child) {
        child = { name, path: array.place.slice(0, i + 1), value: 0, count: 0 };
        if (last) child.array = array; else { child.children = []; child.byName = new Map(); node.byName.set(name, child); }
        node.children.push(child);
      }
      child.value += weight(array); child.count++;
      node = child;
    });
  }
  return root;
}

function drawTree(root) {
  const host = $('tree');
  host.replaceChildren();
  if (!root.count) { host.append(make('p', 'empty', 'Nothing matches. Clear the search, or choose more kinds above.')); return; }
  const walk = (node, depth) => {
    const key = node.path.join('.'), closed = state.closed.has(key) && !state.search;
    const row = make('button', `row${node.children ? ' group' : ''}${node.array && node.array === state.selected ? ' selected' : ''}`);
    const name = make('span', 'name'), bar = make('span', 'bar'), fill = make('span', '');
    name.style.paddingLeft = `${depth * 12}px`;
    name.append(make('i', '', node.children ? (closed ? '▸' : '▾') : ''), node.name);
    fill.style.cssText = `width:${((100 * node.value) / Math.max(root.value, 1)).toFixed(2)}%;--fill:${node.array ? colorOf(node.array) : 'var(--soft)'}`;
    bar.append(fill);
    row.append(name, bar, make('span', 'num', node.array && node.array.free ? `≤ ${bytes(node.array.local)}` : bytes(node.value)));
    row.title = node.path.join('.');
    row.onclick = () => {
      if (node.array) { select(node.array); return; }
      if (state.closed.has(key)) state.closed.delete(key); else state.closed.add(key);
      draw();
    };
    if (node.children) row.ondblclick = () => { state.zoom = node.path; draw(); };
    host.append(row);
    if (node.children && !closed) node.children.forEach((child) => walk(child, depth + 1));
  };
  root.children.forEach((child) => walk(child, 0));
}

function drawMap(root) {
  const svg = $('map'), width = svg.clientWidth || 800, height = 300;
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  let top = root;
  for (const name of state.zoom) { const next = top.byName && top.byName.get(name); if (!next) { state.zoom = []; top = root; break; } top = next; }
  const crumbs = $('crumbs');
  crumbs.replaceChildren(`${bytes(top.value)} in ${top.count} arrays`);
  if (state.zoom.length) {
    crumbs.append(' · ');
    ['all', ...state.zoom].forEach((name, i) => {
      const button = make('button', '', name);
      button.onclick = () => { state.zoom = state.zoom.slice(0, i); draw(); };
      crumbs.append(i ? ' › ' : '', button);
    });
  }
  layoutTree(top, { x: 0, y: 0, w: width, h: height }, (node, box, head) => {
    const rect = shape('rect', { x: box.x, y: box.y, width: box.w, height: box.h, rx: 2, class: node.children ? 'group' : 'leaf' });
    if (!node.children) {
      rect.style.fill = colorOf(node.array);
      if (node.array === state.selected) rect.classList.add('selected');
      rect.onclick = () => select(node.array);
      rect.onmousemove = (event) => showTip(event, tipOf(node.array));
    } else {
      rect.onclick = () => { state.zoom = node.path; draw(); };
      rect.onmousemove = (event) => showTip(event, [node.path.join('.'), `${bytes(node.value)} on each device, ${node.count} arrays. Click to look closer.`]);
    }
    rect.onmouseleave = hideTip;
    svg.append(rect);
    if (head) svg.append(label(fit(`${node.name}  ${bytes(node.value)}`, box.w - 8, areaPen, 600), box.x + 5, box.y + 12, 'start', 'head'));
    if (!node.children && box.w > 34 && box.h > 16) {
      svg.append(label(fit(node.name, box.w - 8), box.x + 5, box.y + 13, 'start'));
      if (box.h > 30) svg.append(label(fit(bytes(node.value), box.w - 8), box.x + 5, box.y + 27, 'start', 'sub'));
    }
  });
}

const shapeText = (a) => a.dims.map((d) => d[0]).join(' × ') || 'scalar';
const tipOf = (a) => [a.path, `${a.kind}, ${shapeText(a)} ${a.dtype}`, splitName(a), `${a.free ? 'at most ' : ''}${bytes(a.local)} on each device, ${bytes(a.bytes)} in all`, a.why];

function drawDetail() {
  const host = $('detail'), a = state.selected;
  host.replaceChildren();
  if (!a) { host.append(make('p', 'empty', 'Select an array in the tree or in the areas.')); return; }
  const waste = a.waste ? `, ${bytes(a.waste)} of padding (${((100 * a.waste) / (a.bytes + a.waste)).toFixed(2)} %)` : ', no padding';
  const copies = a.copies > 1 ? `each part on ${a.copies} devices` : 'each part on one device';
  host.append(breakable('h3', '', a.path));
  if (numDevices === 1) {
    const share = a.free ? '' : `, ${((100 * a.local) / Math.max(visible().reduce((n, b) => n + weight(b), 0), 1)).toFixed(1)} % of the areas above`;
    host.append(make('p', '', `${KINDS[a.kind].replace(/s$/, '')}, ${shapeText(a)} ${a.dtype}: ${bytes(a.bytes)}${share}.`));
    host.append(make('p', '', 'The mesh is one device, which stores every array whole: there is nothing to split.'));
    return;
  }
  host.append(make('p', '', `${KINDS[a.kind].replace(/s$/, '')}, ${shapeText(a)} ${a.dtype}: ${bytes(a.bytes)} in all, ${a.free ? 'at most ' : ''}${bytes(a.local)} on each device; ${a.free ? 'the compiler decides' : copies}${waste}.`));
  for (const remark of a.remarks) host.append(make('p', '', `${remark}.`));
  if (a.dims.length) {
    const table = make('table', ''), head = make('tr', '');
    for (const name of ['dim', 'size', 'mesh axes', 'parts', 'each device', 'padding', 'why']) head.append(make('th', /size|parts|each|padding/.test(name) ? 'num' : name === 'why' ? 'why' : '', name));
    table.append(head);
    a.dims.forEach(([size, axes, parts, local, source], i) => {
      const row = make('tr', '');
      [i, size, axes.join(' + ') || '–', parts, local, local * parts - size || '–', source].forEach((value, k) => row.append(k === 6 ? breakable('td', 'why', value) : make('td', [1, 3, 4, 5].includes(k) ? 'num' : '', String(value))));
      table.append(row);
    });
    host.append(table);
  }
  const picture = make('div', '');
  host.append(picture);
  if (!a.free) drawPicture(picture, a, data.mesh, showTip, hideTip);
}

function drawLegend(arrays) {
  const host = $('legend'), totals = new Map();
  for (const a of arrays) totals.set(groupName(a), [a, (totals.get(groupName(a)) || [a, 0])[1] + weight(a)]);
  host.replaceChildren(...[...totals].map(([name, [a, total]]) => {
    const item = make('span', ''), swatch = make('i', '');
    swatch.style.background = colorOf(a);
    item.append(swatch, total ? `${name}: ${bytes(total)}` : name);
    return item;
  }));
}

function draw() {
  const arrays = visible(), root = treeOf(arrays);
  $('count').textContent = `${arrays.length} of ${data.arrays.length} arrays`;
  drawTree(root); drawMap(root); drawLegend(arrays); drawDetail();
}

function select(array) { state.selected = array; hideTip(); draw(); }

// Adds a chip that redraws the page.
const filter = (host, text, pressed, toggle) => chip(host, text, pressed, () => { const on = toggle(); draw(); return on; });

function setUp() {
  $('title').textContent = data.title;
  $('mesh').textContent = numDevices > 1 ? data.meshText : 'one device: nothing to split, so the page shows sizes';
  document.body.classList.toggle('one-device', numDevices === 1);
  if (numDevices === 1) $('where').textContent = 'Bytes';
  const parameters = data.arrays.filter((a) => a.kind === 'parameter'), stored = data.arrays.filter((a) => a.kind === 'parameter' || a.kind === 'slot');
  const sum = (list, f) => list.reduce((n, a) => n + f(a), 0);
  const elements = sum(parameters, (a) => a.dims.reduce((n, d) => n * d[0], 1));
  const waste = sum(stored, (a) => a.waste), all = sum(stored, (a) => a.bytes);
  const total = [
    ['parameters', elements >= 1e9 ? `${(elements / 1e9).toFixed(2)} B` : elements >= 1e6 ? `${(elements / 1e6).toFixed(1)} M` : elements.toLocaleString('en')],
    [numDevices > 1 ? 'of state on each device' : 'of state', bytes(sum(stored, (a) => a.local))],
    [numDevices > 1 ? 'of parameters on each device' : 'of parameters', bytes(sum(parameters, (a) => a.local))],
  ];
  if (numDevices > 1) total.push(['of state in all', bytes(all)], ['padding', `${((100 * waste) / Math.max(all + waste, 1)).toFixed(2)} %`]);
  for (const [name, value] of total) {
    const item = make('div', '');
    item.append(make('dt', '', name), make('dd', '', value));
    $('totals').append(item);
  }
  if (data.problems.length) {
    $('problems').hidden = false;
    $('problems').querySelector('summary').textContent = `${data.problems.length} finding${data.problems.length > 1 ? 's' : ''} of the check`;
    $('problems').querySelector('ul').append(...data.problems.map((p) => {
      const item = make('li', p.severity, p.text);
      if (p.remedy) item.append(make('span', '', p.remedy));
      return item;
    }));
  }
  const chosen = decodeURIComponent(location.hash.slice(1));
  // Opens on the parameter with most parts; if no parameter or slot is split, on another array that is.
  const candidates = stored.some((a) => partsOf(a) > 1) || numDevices === 1 ? parameters : data.arrays;
  const mostSplit = [...candidates].sort((a, b) => partsOf(b) - partsOf(a) || b.local - a.local)[0] || null;
  state.selected = data.arrays.find((a) => a.path === chosen) || mostSplit;
  if (state.selected) state.kinds.add(state.selected.kind);
  for (const [kind, name] of Object.entries(KINDS)) {
    const count = data.arrays.filter((a) => a.kind === kind).length;
    if (count) filter($('kinds'), `${name} ${count}`, state.kinds.has(kind), () => { if (!state.kinds.delete(kind)) state.kinds.add(kind); return state.kinds.has(kind); });
  }
  filter($('flags'), 'only not split', false, () => (state.whole = !state.whole));
  filter($('flags'), 'only padded', false, () => (state.padded = !state.padded));
  $('color').onchange = () => { state.color = $('color').value; draw(); };
  $('search').oninput = () => { state.search = $('search').value; draw(); };
  addEventListener('keydown', (event) => {
    if (event.key === '/' && document.activeElement !== $('search')) { event.preventDefault(); $('search').focus(); }
    if (event.key === 'Escape') { $('search').value = state.search = ''; state.zoom = []; draw(); }
  });
  addEventListener('resize', draw);
  setUpTheme();
  draw();
}

setUp();
