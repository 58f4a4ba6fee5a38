// Long lists have a filter box: it hides the rows, or the entries of the log, that lack its words.

const box = document.querySelector(".filter");

/** The elements of each entry: a row of a table, a dated item of a list, or a dated paragraph and what follows it. */
function entriesOf(article) {
  const dated = (element) => /^\d{4}-\d\d-\d\d/.test(element.querySelector("strong")?.textContent);
  const entries = [];
  let open = null; // the entry of the last dated paragraph, up to the next heading
  for (const element of article.children) {
    const items = [...element.children].filter((child) => child.tagName === "LI" && dated(child));
    if (items.length) entries.push(...items.map((item) => [item]));
    else if (element.tagName === "P" && dated(element)) entries.push((open = [element]));
    else if (/^H\d$/.test(element.tagName)) open = null;
    else open?.push(element);
  }
  return entries.length ? entries : [...article.querySelectorAll("tbody tr")].map((row) => [row]);
}

if (box) {
  const [input, count] = [box.querySelector("input"), box.querySelector("output")];
  const article = box.parentElement;
  const entries = entriesOf(article);
  const texts = entries.map((entry) => entry.map((e) => e.textContent).join(" ").toLowerCase());

  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = texts.map((text) => words.every((word) => text.includes(word)));
    entries.forEach((entry, i) => entry.forEach((element) => (element.hidden = !shown[i])));
    for (const table of article.querySelectorAll("table")) {
      table.hidden = words.length > 0 && !table.querySelector("tbody tr:not([hidden])");
    }
    count.textContent = `${shown.filter(Boolean).length} of ${entries.length}`;
  };

  input.addEventListener("input", apply);
  box.hidden = false;
  apply();
}
