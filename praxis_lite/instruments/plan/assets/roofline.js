// The roofline: FLOPs per byte of memory and FLOPs per second of each layer, below the limits of the chip.

function drawRoofline() {
  if ($('layers-roofline').hidden) return;
  const svg = $('roofline'), width = svg.clientWidth || 800, height = width < 560 ? 300 : 360;
  const { peaks, bandwidth, efficiency } = data.chip;
  const all = timeByLayer();
  const points = all.filter((row) => row.flops > 0 && row.bytes > 0 && row.seconds > row.communication);
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const total = data.headline.seconds, without = all.filter((row) => !row.flops).reduce((sum, row) => sum + row.seconds - row.communication, 0);
  $('roofline-note').textContent = points.length ? `areas are shares of the time; layers without products, ${percent(without / total)} of the ${WORK}, have no place here` : 'no layer has products';
  if (!points.length) { svg.style.height = 0; return; }
  for (const row of points) { row.x = row.flops / row.bytes; row.y = row.flops / (row.seconds - row.communication); }
  const top = Math.max(...Object.values(peaks)), ridge = peaks.bf16 / bandwidth;
  const range = (values, room) => [Math.min(...values) / room, Math.max(...values) * room];
  const [x0, x1] = range([...points.map((p) => p.x), ridge / 8, ridge * 8], 1.3), [y0, y1] = range([...points.map((p) => p.y / 3), peaks.bf16 / 20, top], 1.4);
  const plot = { left: 62, right: width - 12, top: 10, bottom: height - 36 };
  const at = (value, low, high, from, to) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
  const X = (x) => at(x, x0, x1, plot.left, plot.right), Y = (y) => at(y, y0, y1, plot.bottom, plot.top);

  for (const x of ticks(x0, x1)) svg.append(shape('line', { class: 'grid', x1: X(x), x2: X(x), y1: plot.top, y2: plot.bottom }), label(short(x), X(x), plot.bottom + 14, 'middle'));
  for (const y of ticks(y0, y1)) svg.append(shape('line', { class: 'grid', x1: plot.left, x2: plot.right, y1: Y(y), y2: Y(y) }), label(short(y), plot.left - 6, Y(y) + 4, 'end'));
  svg.append(label('FLOPs per byte of memory', (plot.left + plot.right) / 2, height - 6, 'middle'), label('FLOP/s', plot.left + 4, plot.top + 10, 'start'));

  const ceiling = (peak, memory, kind) => {
    const bend = Math.min(Math.max(peak / memory, x0), x1), start = Math.max(x0, y0 / memory);
    svg.append(shape('polyline', { class: `ceiling ${kind}`, points: [[start, start * memory], [bend, Math.min(peak, bend * memory)], [x1, peak]].map(([x, y]) => `${X(x)},${Y(y)}`).join(' ') }));
  };
  // If dtypes have the same peak, the first one names the line.
  const names = new Map();
  for (const dtype of ['bf16', 'f32']) if (dtype in peaks && ![...names.values()].includes(peaks[dtype])) names.set(dtype, peaks[dtype]);
  const placed = [], written = [];
  for (const [dtype, peak] of names) {
    ceiling(peak, bandwidth, '');
    const text = `${dtype} ${short(peak)} FLOP/s`, y = Y(peak) + (dtype === 'bf16' ? -5 : 13);
    written.push(label(text, plot.right - 4, y, 'end'));
    placed.push({ x: X(peak / bandwidth), y: Y(peak) - 1, w: plot.right, h: 2 });
    placed.push({ x: plot.right - 4 - text.length * 6, y: y - 11, w: text.length * 6, h: 14 });
  }
  ceiling(peaks.bf16 * efficiency.compute, bandwidth * efficiency.memory, 'reach');
  const slope = Math.max(x0 * 1.3, (y0 * 1.3) / bandwidth);
  written.push(label(`memory ${short(bandwidth)}B/s`, X(slope) + 10, Y(slope * bandwidth) + 14, 'start'));

  points.sort((a, b) => b.seconds - a.seconds);
  const radius = (row) => Math.max(3, 26 * Math.sqrt(row.seconds / total));
  for (const row of points) {
    const circle = shape('circle', { cx: X(row.x), cy: Y(row.y), r: radius(row) });
    circle.style.fill = groupColor(groupOf(row.layer));
    circle.onmousemove = (event) => showTip(event, [row.layer || '(no layer)', `${short(row.x)} FLOPs per byte, ${short(row.y)} FLOP/s: ${percent(row.y / peaks.bf16)} of the bf16 peak`, `${seconds(row.seconds - row.communication)} a ${WORK}, ${short(row.flops)} FLOPs, ${bytes(row.bytes)}`]);
    circle.onmouseleave = hideTip;
    svg.append(circle);
  }
  svg.append(...written);
  nameCircles(svg, points.slice(0, 12).map((row) => ({ x: X(row.x), y: Y(row.y), r: radius(row), text: shortName(row.layer) })), placed, plot);
}

// Returns 1, 2 and 5 times each power of ten in a range; in a long range, only the powers.
function ticks(low, high) {
  const found = [], steps = high / low > 2000 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) found.push(...steps.map((n) => n * 10 ** power));
  return found.filter((n) => n >= low && n <= high);
}

// Writes names near the circles if they fit into the plot and hide no other name.
function nameCircles(svg, circles, placed, plot) {
  const free = (box) => box.x > plot.left && box.x + box.w < plot.right && box.y > plot.top && box.y + box.h < plot.bottom
    && placed.every((o) => box.x + box.w < o.x || o.x + o.w < box.x || box.y + box.h < o.y || o.y + o.h < box.y);
  for (const circle of circles) {
    const w = circle.text.length * 6.1 + 4, h = 13;
    for (let k = 0; k < 24; k++) {
      const below = 14 + 15 * Math.floor(k / 3), side = [-w / 2, 10, -w - 10][k % 3];
      const box = { x: circle.x + side, y: circle.y + below + (k % 3 ? 0 : circle.r - 10), w, h };
      if (!free(box)) continue;
      placed.push(box);
      const edge = Math.min(Math.max(circle.x, box.x), box.x + w);
      svg.append(shape('line', { class: 'leader', x1: circle.x, y1: circle.y, x2: edge, y2: box.y + 2 }), label(circle.text, box.x + 2, box.y + 10, 'start', 'name'));
      break;
    }
  }
}
