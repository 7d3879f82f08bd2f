'use strict';
// Shared by all pages: the data, elements, numbers as text, the tooltip, filter chips, and the light or dark theme.

const data = JSON.parse(document.getElementById('data').textContent);
const $ = (id) => document.getElementById(id);

function shape(name, attributes) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function label(text, x, y, anchor, kind = '') {
  const element = shape('text', { x, y, 'text-anchor': anchor, class: kind });
  element.textContent = text;
  return element;
}

function make(tag, kind, text = '') {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text) element.textContent = text;
  return element;
}

// Makes an element with a path or a reason, which a narrow page breaks after dots.
function breakable(tag, kind, text) {
  const element = make(tag, kind), parts = text.split(/(?<=\.)/);
  element.append(...parts.flatMap((part, i) => (i ? [make('wbr'), part] : [part])));
  return element;
}

function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return `${i === 0 ? n : n >= 100 ? n.toFixed(0) : n.toFixed(n >= 10 ? 1 : 2)} ${units[i]}`;
}

const areaPen = document.createElement('canvas').getContext('2d');
// Returns a text, shortened if it is wider than `width`, in the font of areas, or in that of the context `pen`.
function fit(text, width, pen = areaPen, weight = 400) {
  if (pen === areaPen) pen.font = `${weight} 11px ${getComputedStyle(document.body).fontFamily}`;
  const whole = pen.measureText(text).width;
  if (whole <= width) return text;
  let length = Math.max(0, Math.floor((text.length * width) / whole));
  while (length > 0 && pen.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return `${text.slice(0, length)}…`;
}

function showTip(event, lines) {
  const tip = $('tip');
  tip.replaceChildren(make('b', '', lines[0]), ...lines.slice(1).filter(Boolean).map((line) => make('span', '', line)));
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 10))}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
}
function hideTip() { $('tip').hidden = true; }

// Adds a button that is on or off; `toggle` switches its setting and returns whether it is on.
function chip(host, text, pressed, toggle) {
  const button = make('button', 'chip', text);
  button.setAttribute('aria-pressed', pressed);
  button.onclick = () => button.setAttribute('aria-pressed', toggle());
  host.append(button);
}

// Sets the light or dark theme by the system, the address (`?theme=dark`) or the button, and then calls `changed`.
function setUpTheme(changed = () => {}) {
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const wanted = new URLSearchParams(location.search).get('theme');
  const setTheme = (on) => {
    document.documentElement.classList.toggle('dark', on);
    $('theme').textContent = on ? '☀' : '☾';
    changed();
  };
  setTheme(wanted ? wanted === 'dark' : dark.matches);
  dark.onchange = () => setTheme(dark.matches);
  $('theme').onclick = () => setTheme(!document.documentElement.classList.contains('dark'));
}

