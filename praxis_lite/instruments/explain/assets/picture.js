'use strict';
// An array on the mesh: its parts on the left, the devices on the right. A device has the colour of the part it holds.

const MOST_PARTS = 64, MOST_DEVICES = 4096;

// Returns for each device, in mesh order, the number of its part along each dimension of `array`.
function partsOfDevices(array, mesh) {
  const count = mesh.reduce((n, [, size]) => n * size, 1), found = [];
  for (let device = 0; device < count; device++) {
    const at = {};
    let rest = device;
    for (let i = mesh.length - 1; i >= 0; i--) { at[mesh[i][0]] = rest % mesh[i][1]; rest = Math.floor(rest / mesh[i][1]); }
    const sizes = Object.fromEntries(mesh);
    found.push(array.dims.map(([, axes]) => axes.reduce((part, axis) => part * sizes[axis] + at[axis], 0)));
  }
  return found;
}

// Returns the colour of the part (row, column): hue varies along one dimension, lightness along the other.
function partColor(row, rows, column, columns) {
  const index = columns > 1 ? column : row, count = columns > 1 ? columns : rows;
  const hue = (250 + (count > 1 ? (index * 300) / count : 0)) % 360;
  const shift = columns > 1 && rows > 1 ? (row / (rows - 1) - 0.5) * 0.17 : 0;
  return `oklch(calc(var(--area-l) + ${shift.toFixed(3)}) 0.09 ${hue.toFixed(0)})`;
}

function sliceText(part, local, size) {
  const start = part * local, stop = Math.min(start + local, size);
  return stop > start ? `${start}:${stop}` : 'padding';
}

function deviceList(devices) {
  if (devices.length > 2 && devices[devices.length - 1] - devices[0] === devices.length - 1) {
    return `${devices[0]}–${devices[devices.length - 1]}`;
  }
  return devices.length <= 4 ? devices.join(', ') : `${devices.slice(0, 3).join(', ')}, … (${devices.length})`;
}

// Draws into `host`. `show(event, lines)` and `hide()` control the tooltip.
function drawPicture(host, array, mesh, show, hide) {
  host.replaceChildren();
  const rank = array.dims.length;
  if (!rank) { host.append(make('p', '', 'A scalar: every device holds it.')); return; }
  const held = partsOfDevices(array, mesh);
  const split = array.dims.map((d, i) => i).filter((i) => array.dims[i][2] > 1);
  // Draws two dimensions: those with most parts; if fewer are split, also the largest others.
  const picked = [...split].sort((a, b) => array.dims[b][2] - array.dims[a][2]).slice(0, 2);
  const whole = array.dims.map((d, i) => i).filter((i) => !picked.includes(i)).sort((a, b) => array.dims[b][0] - array.dims[a][0]);
  while (picked.length < Math.min(2, rank)) picked.push(whole.shift());
  picked.sort((a, b) => a - b);
  const [rowDim, colDim] = rank === 1 ? [null, 0] : picked;
  const fixed = split.filter((i) => !picked.includes(i));
  const at = Object.fromEntries(fixed.map((i) => [i, 0]));

  const controls = make('div', 'others'), pictures = make('div', 'pictures');
  for (const i of fixed) {
    const label = make('label', '', `dimension ${i}: `), select = document.createElement('select');
    const [size, , parts, local] = array.dims[i];
    for (let p = 0; p < parts; p++) select.append(new Option(sliceText(p, local, size), p));
    select.onchange = () => { at[i] = Number(select.value); redraw(); };
    label.append(select); controls.append(label);
  }
  if (fixed.length) host.append(controls);
  host.append(pictures);
  redraw();

  function redraw() {
    pictures.replaceChildren();
    const rows = rowDim === null ? 1 : array.dims[rowDim][2], cols = array.dims[colDim][2];
    const inPlane = held.map((parts) => fixed.every((i) => parts[i] === at[i]));
    const holders = new Map();
    held.forEach((parts, device) => {
      if (!inPlane[device]) return;
      const key = `${rowDim === null ? 0 : parts[rowDim]},${parts[colDim]}`;
      if (!holders.has(key)) holders.set(key, []);
      holders.get(key).push(device);
    });
    const groups = new Map();
    const add = (key, element) => {
      element.classList.add('cell');
      element.onmousemove = (event) => { focus(key); show(event, describe(key)); };
      element.onmouseleave = () => { focus(null); hide(); };
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(element);
    };
    const focus = (key) => groups.forEach((elements, k) => elements.forEach((e) => {
      e.classList.toggle('on', k === key); e.classList.toggle('off', key !== null && k !== key);
    }));
    const describe = (key) => {
      const [r, c] = key.split(',').map(Number);
      const index = array.dims.map(([size, , , local], i) => sliceText(i === rowDim ? r : i === colDim ? c : at[i] || 0, local, size));
      const devices = holders.get(key) || [];
      return [`[${index.join(', ')}]`, `device${devices.length > 1 ? 's' : ''} ${deviceList(devices)}`];
    };
    pictures.append(arrayFigure(rows, cols, holders, add), meshFigure(inPlane, rows, cols, add));
  }

  function arrayFigure(rows, cols, holders, add) {
    const rowLength = rowDim === null ? 1 : array.dims[rowDim][0], colLength = array.dims[colDim][0];
    const left = rowDim === null ? 0 : 92, top = 20, widest = Math.min(416, Math.max(160, (host.clientWidth || 800) - left - 2));
    const ratio = Math.sqrt(Math.min(16, Math.max(1 / 16, colLength / Math.max(rowLength, 1))));
    const wide = Math.min(widest, cols * (array.copies > 1 ? 52 : 30)), high = Math.min(260, rows * 20);
    const width = Math.round(Math.min(widest, Math.max(200, wide, 230 * ratio)));
    const height = rowDim === null ? 56 : Math.round(Math.min(260, Math.max(100, high, 230 / ratio)));
    const drawnRows = Math.min(rows, MOST_PARTS), drawnCols = Math.min(cols, MOST_PARTS);
    const w = width / drawnCols, h = height / drawnRows;
    const svg = shape('svg', { width: left + width + 2, height: top + height + 2 });
    svg.append(hatch());
    // Writes numbers in all cells or in none; cells with padding may have none.
    const longest = Math.max(0, ...[...holders.values()].map((devices) => deviceList(devices).length));
    const fits = h > 13 && longest * 6 + 4 < w;
    for (let r = 0; r < drawnRows; r++) for (let c = 0; c < drawnCols; c++) {
      const key = `${r},${c}`, x = left + c * w, y = top + r * h;
      const cell = shape('rect', { x, y, width: w, height: h, fill: partColor(r, rows, c, cols) });
      add(key, cell); svg.append(cell);
      const padCol = padShare(c, colDim), padRow = rowDim === null ? 0 : padShare(r, rowDim);
      if (padCol) svg.append(shape('rect', { class: 'pad', x: x + w * (1 - padCol), y, width: w * padCol, height: h }));
      if (padRow) svg.append(shape('rect', { class: 'pad', x, y: y + h * (1 - padRow), width: w * (1 - padCol), height: h * padRow }));
      const text = deviceList(holders.get(key) || []);
      if (fits && text.length * 6 + 4 < w * (1 - padCol)) svg.append(label(text, x + (w * (1 - padCol)) / 2, y + h / 2 + 4, 'middle'));
    }
    const every = (n, room, need) => Math.max(1, Math.ceil((n * need) / room));
    for (let c = 0; c < drawnCols; c += every(drawnCols, width, 80)) {
      const text = sliceText(c, array.dims[colDim][3], colLength);
      svg.append(label(text, Math.min(left + c * w + w / 2, left + width - text.length * 3), 13, 'middle', 'axis'));
    }
    if (rowDim !== null) for (let r = 0; r < drawnRows; r += every(drawnRows, height, 15)) {
      svg.append(label(sliceText(r, array.dims[rowDim][3], rowLength), left - 6, top + r * h + h / 2 + 4, 'end', 'axis'));
    }
    const names = rowDim === null ? 'dimension 0' : `dimension ${rowDim} down, ${colDim} across`;
    const cut = rows > drawnRows || cols > drawnCols ? `; the first ${MOST_PARTS} parts of each` : '';
    return figure(`The array: ${names}. ${fits ? 'In each part, the devices that hold it' : 'Point at a part for the devices that hold it'}${array.waste ? '; hatched is padding' : ''}${cut}.`, svg);
  }

  function padShare(part, dim) {
    const [size, , , local] = array.dims[dim];
    return local ? Math.min(local, Math.max(0, (part + 1) * local - size)) / local : 0;
  }

  function meshFigure(inPlane, rows, cols, add) {
    const axes = mesh.filter(([, size]) => size > 1);
    const count = held.length, last = axes.length ? axes[axes.length - 1][1] : 1;
    if (count > MOST_DEVICES) return figure(`${count} devices: too many to draw.`, shape('svg', { width: 1, height: 1 }));
    // The longer side is horizontal; a mesh with one axis is wrapped into lines.
    const inner = axes.length === 1 ? Math.min(16, last) : last, outer = Math.ceil(count / inner), turned = outer > inner;
    const columns = turned ? outer : inner, lines = turned ? inner : outer;
    const side = Math.max(5, Math.min(34, Math.floor(Math.min(340 / columns, 300 / Math.min(lines, 30)))));
    const svg = shape('svg', { width: columns * side + 2, height: lines * side + 2 });
    held.forEach((parts, device) => {
      const r = rowDim === null ? 0 : parts[rowDim], c = parts[colDim];
      const a = (device % inner) * side, b = Math.floor(device / inner) * side, [x, y] = turned ? [b, a] : [a, b];
      const cell = shape('rect', { x, y, width: side, height: side, rx: 2, fill: inPlane[device] ? partColor(r, rows, c, cols) : 'var(--whole)' });
      if (inPlane[device]) add(`${r},${c}`, cell); else { cell.classList.add('cell', 'off'); }
      svg.append(cell);
      if (side >= String(count - 1).length * 6.2 + 6) svg.append(label(String(device), x + side / 2, y + side / 2 + 4, 'middle'));
    });
    const others = axes.slice(0, -1).map(([name]) => name).join(' × '), name = axes.length ? axes[axes.length - 1][0] : '';
    const [down, across] = turned ? [name, others] : [others, name];
    const how = axes.length > 1 ? `${down} down, ${across} across` : axes.length ? `along ${name}` : 'one device';
    return figure(`The mesh: ${how}. Same colour, same part${array.copies > 1 ? `: each is on ${array.copies} devices` : ''}.`, svg);
  }
}

function hatch() {
  const defs = shape('defs', {}), pattern = shape('pattern', { id: 'hatch', width: 6, height: 6, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' });
  pattern.append(shape('rect', { width: 6, height: 6, fill: 'var(--panel)', opacity: 0.65 }), shape('rect', { width: 2, height: 6, fill: 'var(--soft)' }));
  defs.append(pattern);
  return defs;
}

function figure(caption, svg) {
  const element = make('figure', ''), words = make('figcaption', '', caption);
  const [width, height] = ['width', 'height'].map((name) => Number(svg.getAttribute(name)));
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`); // So that a narrow page can shrink it.
  words.style.maxWidth = `${Math.max(280, width)}px`;
  element.append(words, svg);
  return element;
}
