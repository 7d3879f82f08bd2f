'use strict';
// A treemap of arrays: each node gets a rectangle in proportion to its value, as near to a square as rows allow (Bruls,
// Huizing and van Wijk, Squarified Treemaps, 2000).

// Divides `box` among `nodes`, which are sorted by descending value. Returns one box {x, y, w, h} for each.
function squarify(nodes, box) {
  const total = nodes.reduce((sum, node) => sum + node.value, 0);
  const boxes = [];
  let { x, y, w, h } = box, rest = total, start = 0;
  while (start < nodes.length) {
    const side = Math.min(w, h), scale = rest > 0 ? (w * h) / rest : 0;
    let end = start, sum = 0, worst = Infinity;
    while (end < nodes.length) {
      const next = sum + nodes[end].value, area = next * scale;
      const largest = nodes[start].value * scale, smallest = nodes[end].value * scale;
      const ratio = Math.max((side * side * largest) / (area * area), (area * area) / (side * side * smallest || 1e-9));
      if (ratio > worst) break;
      worst = ratio; sum = next; end++;
    }
    const thick = side > 0 ? (sum * scale) / side : 0;
    let offset = 0;
    for (let i = start; i < end; i++) {
      const length = sum > 0 ? (side * nodes[i].value) / sum : 0;
      boxes.push(w >= h ? { x, y: y + offset, w: thick, h: length } : { x: x + offset, y, w: length, h: thick });
      offset += length;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    rest -= sum; start = end;
  }
  return boxes;
}

// Calls draw(node, box, hasHead) for a node and its descendants, parents first.
function layoutTree(node, box, draw, depth = 0) {
  if (box.w < 1.5 || box.h < 1.5) return;
  if (!node.children) { draw(node, box, false); return; }
  const head = depth > 0 && box.w > 60 && box.h > 44;
  if (depth > 0) draw(node, box, head);
  const gap = depth > 0 ? 2 : 0;
  const inner = { x: box.x + gap, y: box.y + (head ? 17 : gap), w: box.w - 2 * gap, h: box.h - (head ? 17 : gap) - gap };
  const shown = node.children.filter((child) => child.value > 0).sort((a, b) => b.value - a.value);
  squarify(shown, inner).forEach((place, i) => layoutTree(shown[i], place, draw, depth + 1));
}
