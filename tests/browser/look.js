// What a person could not read of the notebook on show: [] or sentences, the same in both themes.
// Runs inside the page, as the body of a function.

const LEAST_CONTRAST = 4.5; // of WCAG 2.1 AA for text of usual size; 3 for large text
const LARGE_PX = 24;
const LARGE_BOLD_PX = 18.66;

const notebook = document.querySelector(".jp-Notebook");
const found = new Set();
const words = element => (element.innerText || element.value || element.tagName).trim().slice(0, 60);
const seen = element => element.getClientRects().length > 0;

// Wider than the place it has: cut off, or to be scrolled sideways.
const places = ".jp-OutputArea-output, .jp-OutputArea-output *, .jp-RenderedMarkdown, .cm-scroller";
for (const element of notebook.querySelectorAll(places)) {
  if (!seen(element) || element.scrollWidth <= element.clientWidth + 1) continue;
  const overflow = getComputedStyle(element).overflowX;
  const control = element.matches("input, select, textarea");
  if (overflow === "visible" || control || element.clientWidth === 0) continue;
  found.add(`too wide (${element.scrollWidth} in ${element.clientWidth} px): ${words(element)}`);
}

function colour(text) {
  const numbers = text.match(/[\d.]+/g).map(Number);
  const scale = text.startsWith("color(srgb") ? 255 : 1;
  return [...numbers.slice(0, 3).map(n => n * scale), numbers[3] ?? 1];
}

const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));

function ancestors(element) {
  const chain = [];
  for (let each = element; each; each = each.parentElement) chain.unshift(each);
  return chain;
}

function luminance(rgb) {
  const linear = rgb.map(n => (n / 255 <= 0.04045 ? n / 255 / 12.92 : ((n / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function contrast(element) {
  let background = [255, 255, 255];
  let opacity = 1;
  for (const each of ancestors(element)) {
    const style = getComputedStyle(each);
    background = over(colour(style.backgroundColor), background);
    opacity *= Number(style.opacity);
  }
  const ink = colour(getComputedStyle(element).color);
  const text = over([...ink.slice(0, 3), ink[3] * opacity], background);
  const [dark, light] = [luminance(text), luminance(background)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}

// Text too near to its background. What is disabled may be pale.
const walker = document.createTreeWalker(notebook, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const place = element.closest(".jp-OutputArea-output, .jp-RenderedMarkdown");
  if (!place || !walker.currentNode.data.trim() || !seen(element)) continue;
  // The colours of buttons, headers and highlighted code are JupyterLab's own; a hidden sign says
  // nothing that the words beside it do not.
  const own = "button, [disabled], .jp-InternalAnchorLink, .jp-RenderedMarkdown pre, [class*=-header]";
  if (element.closest(`style, script, [aria-hidden=true], ${own}`)) continue;
  if (element.closest(".widget-checkbox")?.querySelector("input:disabled")) continue;
  const style = getComputedStyle(element);
  const size = parseFloat(style.fontSize);
  const large = size >= LARGE_PX || (size >= LARGE_BOLD_PX && Number(style.fontWeight) >= 700);
  const ratio = contrast(element);
  if (ratio < (large ? 3 : LEAST_CONTRAST)) {
    found.add(`too pale (contrast ${ratio.toFixed(1)}): ${walker.currentNode.data.trim().slice(0, 60)}`);
  }
}

// Pictures bring their own background, or dark ink would stand on a dark page. Those with the
// class kit-image are transparent: their ink is neutral.
for (const image of notebook.querySelectorAll(".jp-OutputArea-output img")) {
  if (!seen(image) || !image.complete || !image.naturalWidth) continue;
  if (image.matches(".kit-image")) continue;
  const canvas = new OffscreenCanvas(1, 1);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  if (context.getImageData(0, 0, 1, 1).data[3] < 255) found.add("a picture without a background");
}

return [...found];
