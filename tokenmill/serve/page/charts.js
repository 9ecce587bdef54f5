/* Draws the live view's three pictures on canvases, in the page's own colours. */

const GAP = 1; // between squares and bars, in CSS pixels
const MOST_STEPS = 200;
const LARGEST = 18; // side of a square
const HIGHEST = 280; // of the map of blocks

/** A cleared canvas in the resolution of the screen; sizes are in CSS pixels. */
function surface(canvas) {
  const ratio = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  context.font = `11px ${style.fontFamily}`;
  return { context, width, height, colour };
}

/** One square per cell, as large as fits. Returns which cell is at a point. */
export function drawPool(canvas, cells) {
  const inside = canvas.clientWidth;
  if (!inside || !cells.length) return () => -1;
  let side = LARGEST;
  const height = () => Math.ceil(cells.length / Math.floor(inside / side)) * side;
  while (side > 2 && height() > HIGHEST) side -= 1;
  canvas.style.height = `${height()}px`;
  const { context, colour } = surface(canvas);
  const columns = Math.floor(inside / side);
  const gap = side > 4 ? GAP : side > 2 ? 0.5 : 0;
  ["free", "cached", "used", "shared"].forEach((name, state) => {
    context.fillStyle = colour(name);
    for (let at = 0; at < cells.length; at += 1) {
      if (cells.charCodeAt(at) - 48 !== state) continue;
      context.fillRect((at % columns) * side, Math.floor(at / columns) * side, side - gap, side - gap);
    }
  });
  return (x, y) => Math.floor(y / side) * columns + Math.min(columns - 1, Math.floor(x / side));
}

/** Decode rows upwards, prefill tokens downwards, each in its own scale: one is tens, the other hundreds. Returns
    which step is at a point. */
export function drawSteps(canvas, steps) {
  const { context, width, height, colour } = surface(canvas);
  // Whole pixels of the screen: bars of equal width.
  const pitch = Math.max(1, Math.floor((width / MOST_STEPS) * devicePixelRatio)) / devicePixelRatio;
  const middle = Math.round(height * 0.55);
  const up = Math.max(0, ...steps.map((step) => step[1]));
  const down = Math.max(0, ...steps.map((step) => step[2]));
  const left = width - steps.length * pitch;
  const wide = pitch >= 3 ? pitch - GAP : pitch;
  steps.forEach(([, decodes, prefilled], at) => {
    const x = left + at * pitch;
    context.fillStyle = colour("used");
    const rise = decodes && Math.max(1, (decodes / up) * (middle - 16));
    context.fillRect(x, middle - rise, wide, rise);
    context.fillStyle = colour("other");
    const fall = prefilled && Math.max(1, (prefilled / down) * (height - middle - 17));
    context.fillRect(x, middle + 1, wide, fall);
  });
  context.fillStyle = colour("line");
  context.fillRect(0, middle, width, 1);
  context.fillStyle = colour("faint");
  context.fillText(`${up} ${up === 1 ? "row" : "rows"}`, 0, 10);
  context.fillText(`${down} ${down === 1 ? "token" : "tokens"}`, 0, height - 2);
  return (x) => Math.floor((x - left) / pitch);
}

/** A line over time with its area, and a line for half and for the most. */
export function drawRates(canvas, values) {
  const { context, width, height, colour } = surface(canvas);
  const top = ceiling(Math.max(...values));
  const floor = height - 16;
  const x = (at) => (at / (values.length - 1)) * width;
  const y = (value) => floor - (value / top) * (floor - 16);
  context.fillStyle = colour("line");
  for (const part of [0, 0.5, 1]) context.fillRect(0, Math.round(y(top * part)), width, 1);
  const path = new Path2D();
  values.forEach((value, at) => path.lineTo(x(at), y(value)));
  context.strokeStyle = colour("used");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke(path);
  path.lineTo(width, floor);
  path.lineTo(0, floor);
  context.globalAlpha = 0.12;
  context.fillStyle = colour("used");
  context.fill(path);
  context.globalAlpha = 1;
  context.fillStyle = colour("faint");
  context.fillText(String(top), 0, y(top) - 4);
  context.fillText("2 min ago", 0, height - 2);
  context.textAlign = "right";
  context.fillText("now", width, height - 2);
  context.textAlign = "left";
}

/** A round number that is not below `most`. */
function ceiling(most) {
  if (most <= 10) return 10;
  const unit = 10 ** Math.floor(Math.log10(most));
  return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * unit >= most);
}
