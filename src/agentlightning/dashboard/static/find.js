// Search in a page: all places of a text are marked, and shown one after the other.
import { html, useEffect, useRef, useState } from "./lib.js";

const MOST = 2000;

// The places of a text, in any case, in what may be searched.
function placesOf(text) {
  const wanted = text.toLowerCase();
  const found = [];
  for (const root of wanted ? document.querySelectorAll("main .searched") : []) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const lower = node.data.toLowerCase();
      const own = lower.length === node.length ? lower : node.data; // a few letters become two
      for (let at = own.indexOf(wanted); at >= 0 && found.length < MOST; at = own.indexOf(wanted, at + wanted.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + wanted.length);
        found.push(range);
      }
    }
  }
  return found;
}

function mark(places, here) {
  if (!CSS.highlights) return;
  CSS.highlights.set("found", new Highlight(...places));
  CSS.highlights.set("here", new Highlight(...places.slice(here, here + 1)));
}

export function Find({ text, change, note }) {
  const [count, setCount] = useState(0);
  const here = useRef(-1);
  const [, shown] = useState(-1);
  useEffect(() => {
    const places = placesOf(text);
    mark(places, here.current);
    setCount(places.length);
  });
  useEffect(() => () => mark([], 0), []);
  const go = (event) => {
    event.preventDefault();
    const places = placesOf(text);
    if (!places.length) return;
    here.current = (here.current + 1) % places.length;
    const element = places[here.current].startContainer.parentElement;
    for (let each = element.closest("details"); each; each = each.parentElement.closest("details")) each.open = true;
    element.scrollIntoView({ block: "center" });
    mark(places, here.current);
    shown(here.current);
  };
  const type = (event) => {
    here.current = -1;
    change(event.target.value);
  };
  const said = !text ? "" : !count ? "not found" : here.current < 0 ? `${count === MOST ? "more than " : ""}${count} found` : `${here.current + 1} of ${count}`;
  return html`<form class="find" role="search" onSubmit=${go}><input type="search" aria-label="Search in this rollout" placeholder="Search in this rollout" value=${text} onInput=${type} /><button type="submit" disabled=${!count}>Next place</button>
    <span class="muted small" role="status">${said}${text && note ? ` ${note}` : ""}</span></form>`;
}
