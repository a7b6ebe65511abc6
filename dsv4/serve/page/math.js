// Formulas to MathML. Temml makes a tree, of which only known elements and attributes become nodes.

import { lazily, make } from "./dom.js";

const MAX_CHARACTERS = 4000;
const MAX_NODES = 5000;
const MATHML = "http://www.w3.org/1998/Math/MathML";
const ELEMENTS = new Set(
  (
    "math mrow mi mn mo ms mtext mspace msub msup msubsup munder mover munderover mfrac msqrt mroot " +
    "mtable mtr mtd mpadded mphantom menclose mstyle merror mmultiscripts mprescripts none semantics"
  ).split(" "),
);
const ATTRIBUTES = new Set(
  (
    "display mathvariant stretchy fence separator lspace rspace symmetric largeop movablelimits " +
    "accent accentunder form linethickness displaystyle scriptlevel columnalign rowalign " +
    "columnspacing rowspacing width height depth voffset minsize maxsize columnlines rowlines " +
    "columnspan rowspan mathcolor mathbackground mathsize notation align lquote rquote"
  ).split(" "),
);

const useTemml = lazily(() => import("./vendor/temml.js"));

// An element that shows the formula, or its source while the library is loaded or if it cannot be read.
export function formula(source, isDisplay) {
  const box = make(isDisplay ? "div" : "span", { className: isDisplay ? "formula display" : "formula" });
  const isDrawn = useTemml((temml) => draw(temml, box, source, isDisplay));
  if (!isDrawn) box.append(make("code", {}, source));
  return box;
}

function draw(temml, box, source, isDisplay) {
  try {
    if (source.length > MAX_CHARACTERS) throw new Error("too long");
    const options = {
      displayMode: isDisplay,
      trust: false,
      throwOnError: true,
      maxSize: [20, 200],
      maxExpand: 200,
    };
    const tree = temml.__renderToMathMLTree(source, options);
    const budget = { left: MAX_NODES };
    const math = build(tree, budget);
    // A wide formula in a line scrolls inside its own box.
    box.classList.toggle("long", !isDisplay && MAX_NODES - budget.left > 60);
    if (isDisplay) box.tabIndex = 0;
    box.replaceChildren(math);
  } catch (problem) {
    // Half a formula, or none: show its source.
    box.replaceChildren(make("code", { title: String(problem.message).slice(0, 300) }, source));
  }
}

function build(node, budget) {
  if (--budget.left < 0) throw new Error("too large");
  if (node.text !== undefined) return document.createTextNode(node.text);
  const children = (node.children || []).map((child) => build(child, budget));
  let element;
  if (node.type === undefined) element = document.createDocumentFragment();
  else if (!ELEMENTS.has(node.type)) throw new Error(`${node.type} is not shown here`);
  else {
    element = document.createElementNS(MATHML, node.type);
    for (const [name, value] of Object.entries(node.attributes || {})) {
      if (ATTRIBUTES.has(name)) element.setAttribute(name, value);
    }
    if (node.classes?.length) element.setAttribute("class", node.classes.join(" "));
    for (const [name, value] of Object.entries(node.style || {})) element.style[name] = value;
  }
  element.append(...children);
  return element;
}
