// Small helpers. Text is only ever set as text, so that no name or message can become markup.

/** Copies a template; `f` finds its parts by their data-f. */
export function copy(id) {
  const root = document.getElementById(id).content.firstElementChild.cloneNode(true);
  const parts = new Map([...root.querySelectorAll('[data-f]')].map((part) => [part.dataset.f, part]));
  return { root, f: (name) => parts.get(name) };
}

/** Sets text, if it is another: what does not change is neither laid out nor read out again. */
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function element(name, className, ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** Keeps one child of `parent` for each key, in order: makes those that are new, removes those that are gone. */
export function keyed(parent, known, keys, make) {
  for (const [key, view] of known) {
    if (!keys.includes(key)) {
      view.root.remove();
      known.delete(key);
    }
  }
  keys.forEach((key, place) => {
    if (!known.has(key)) known.set(key, make(key));
    const { root } = known.get(key);
    if (parent.children[place] !== root) parent.insertBefore(root, parent.children[place] ?? null);
  });
}
