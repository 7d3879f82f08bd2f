// Memory at its peak: a bar of its kinds beside the capacity, and a treemap of kinds, layers and arrays to click through.

const KIND_HUES = { parameters: 250, 'optimizer slots': 205, 'moving averages': 285, inputs: 110, 'saved activations': 70, gradients: 25, temporaries: 165, program: 320, other: null };
const kindColor = (kind) => (KIND_HUES[kind] == null ? 'var(--whole)' : `oklch(var(--area-l) var(--area-c) ${KIND_HUES[kind]})`);
const memory = { zoom: [], focus: false };

// Returns kinds whose bytes add up to the peak. If the schedule counts more than the peak, the temporaries shrink, then
// what else it knows.
function kindsOfPeak() {
  const { other = 0, ...kinds } = data.memory.kinds;
  let much = Math.max(-other, 0);
  for (const kind of ['temporaries', 'gradients', 'saved activations']) {
    const taken = Math.min(kinds[kind] || 0, much);
    kinds[kind] = (kinds[kind] || 0) - taken; much -= taken;
  }
  return Object.entries({ ...kinds, ...(other > 0 ? { other } : {}) }).filter(([, size]) => size > 0);
}

function drawCapacity() {
  const { capacity, peak } = data.memory, svg = $('capacity'), width = svg.clientWidth || 800, height = 46;
  const scale = width / Math.max(capacity, peak);
  svg.replaceChildren(hatchOf('var(--error)'));
  svg.setAttribute('class', 'strip');
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  let x = 0;
  for (const [kind, size] of kindsOfPeak()) {
    const w = size * scale;
    const rect = shape('rect', { x, y: 0, width: Math.max(w - 1, 0.5), height: 26, rx: 2 });
    rect.style.fill = kindColor(kind);
    rect.onmousemove = (event) => showTip(event, [kind, `${bytes(size)}, ${percent(size / peak)} of the peak`]);
    rect.onmouseleave = hideTip;
    svg.append(rect);
    if (w > 60) svg.append(label(fit(`${kind} ${bytes(size)}`, w - 10), x + 6, 17, 'start'));
    x += w;
  }
  const end = capacity * scale, room = end - x;
  if (room > 1) {
    svg.append(shape('rect', { class: 'room', x: x + 1, y: 0.5, width: Math.max(room - 2, 0), height: 25, rx: 2 }));
    if (room > 70) svg.append(label(fit(`${bytes(capacity - peak)} left`, room - 10), x + 8, 17, 'start', 'soft'));
  }
  if (peak > capacity) svg.append(shape('rect', { x: end, y: 0, width: x - end, height: 26, fill: 'url(#hatch)' }));
  svg.append(shape('line', { class: 'limit', x1: end - 1, x2: end - 1, y1: -3, y2: 32 }));
  const over = peak > capacity, text = `capacity ${bytes(capacity)}${over ? `, ${bytes(peak - capacity)} too much` : ''}`;
  svg.append(label(text, Math.min(end + 2, width), 43, 'end', over ? 'bad' : 'soft'));
  if (width > 560 || !over) svg.append(label(`peak ${bytes(peak)}`, 0, 43, 'start', 'soft'));
}

function hatchOf(color) {
  const defs = shape('defs', {}), pattern = shape('pattern', { id: 'hatch', width: 6, height: 6, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' });
  const line = shape('rect', { width: 2, height: 6 });
  line.style.fill = color;
  pattern.append(line); defs.append(pattern);
  return defs;
}

// Returns a tree of kinds, parts of the layer's path, and arrays; a chain of single children becomes one node.
function memoryTree() {
  const root = { name: 'all', path: [], value: 0, children: [], byName: new Map() };
  for (const [kind, layer, phase, name, size, text] of data.memory.leaves) {
    if (size <= 0 || !matches(layer, phase, `${kind} ${name}`)) continue;
    let node = root;
    for (const part of [kind, ...layer.split('.').filter(Boolean)]) {
      if (!node.byName.has(part)) {
        const child = { name: part, path: [...node.path, part], kind, value: 0, children: [], byName: new Map() };
        node.byName.set(part, child); node.children.push(child);
      }
      node = node.byName.get(part);
    }
    node.children.push({ name, path: [...node.path, name], kind, layer, phase, text, value: size });
  }
  const finish = (node) => {
    if (!node.children) return node;
    node.children = node.children.map(finish);
    node.value = node.children.reduce((sum, child) => sum + child.value, 0);
    const [only] = node.children;
    if (node.path.length > 1 && node.children.length === 1 && only.children) return { ...only, name: `${node.name}.${only.name}` };
    return node;
  };
  return finish(root);
}

function nodeAt(root, path) {
  const inside = (node) => node.path.length <= path.length && node.path.every((name, i) => name === path[i]);
  let node = root, next = root;
  while (next) { node = next; next = (node.children || []).find((child) => child.children && inside(child)); }
  return node;
}

function drawMemory() {
  drawCapacity();
  const svg = $('map'), width = svg.clientWidth || 800, height = svg.clientHeight || 340, root = memoryTree();
  const top = nodeAt(root, memory.zoom);
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  drawCrumbs(top);
  const zoomTo = (path) => { memory.zoom = path; hideTip(); drawMemory(); };
  layoutTree(top, { x: 0, y: 0, w: width, h: height }, (node, box, head) => {
    const rect = shape('rect', { x: box.x, y: box.y, width: box.w, height: box.h, rx: 2, class: node.children ? 'group' : 'leaf', tabindex: 0, role: 'button', 'aria-label': `${node.path.join(' ')}: ${bytes(node.value)}` });
    if (!node.children) rect.style.fill = kindColor(node.kind);
    rect.onclick = () => zoomTo(node.children ? node.path : node.path.slice(0, -1));
    rect.onmousemove = (event) => showTip(event, memoryTip(node));
    rect.onmouseleave = rect.onblur = hideTip;
    rect.onfocus = () => { if (rect.matches(':focus-visible')) showTip(pointOf(rect), memoryTip(node)); };
    svg.append(rect);
    if (head) svg.append(label(fit(`${node.name}  ${bytes(node.value)}`, box.w - 8, areaPen, 600), box.x + 5, box.y + 12, 'start', 'head'));
    if (!node.children && box.w > 34 && box.h > 16) {
      svg.append(label(fit(node.name, box.w - 8), box.x + 5, box.y + 13, 'start'));
      if (box.h > 30) svg.append(label(fit(`${bytes(node.value)}  ${node.text}`, box.w - 8), box.x + 5, box.y + 27, 'start', 'sub'));
    }
  });
  svg.onkeydown = (event) => {
    const rects = [...svg.querySelectorAll('rect')], at = rects.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) rects[(at + step + rects.length) % rects.length].focus();
    else if (event.key === 'Enter' || event.key === ' ') { document.activeElement.onclick(); svg.querySelector('rect').focus(); }
    else if (event.key === 'Backspace') { zoomTo(top.path.slice(0, -1)); svg.querySelector('rect').focus(); }
    else return;
    event.preventDefault();
  };
}

const pointOf = (element) => { const box = element.getBoundingClientRect(); return { clientX: box.left, clientY: box.top }; };

function memoryTip(node) {
  const size = `${bytes(node.value)}, ${percent(node.value / data.memory.peak)} of the peak`;
  if (node.children) return [node.path.join(' › '), size, 'Click to look closer.'];
  return [node.layer ? `${node.layer}: ${node.name}` : node.name, `${node.kind}${node.phase ? `, ${node.phase}` : ''}: ${node.text}`, size];
}

function drawCrumbs(top) {
  const crumbs = $('crumbs');
  if (!top.path.length) { crumbs.replaceChildren(bytes(data.memory.peak)); return; }
  crumbs.replaceChildren(bytes(top.value));
  crumbs.append(' · ');
  ['all', ...top.path].forEach((name, i) => {
    const button = make('button', '', name);
    button.onclick = () => { memory.zoom = top.path.slice(0, i); drawMemory(); };
    crumbs.append(i ? ' › ' : '', button);
  });
}

function setUpMemory() {
  const { other = 0 } = data.memory.kinds;
  $('kinds').replaceChildren(...kindsOfPeak().map(([kind, size]) => legendItem(kindColor(kind), `${kind}: ${bytes(size)}`)));
  if (other < 0) $('kinds').append(make('span', '', `Areas of temporaries are an estimate from the schedule; the compiler needs ${bytes(-other)} less, by sharing memory among them.`));
}
