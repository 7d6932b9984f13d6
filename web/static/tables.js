// Sorts and filters the tables the server drew; without this script they stand sorted by size, all rows shown.

function value(row, key, kind) {
  const text = row.dataset[key];
  if (kind !== "number") return text;
  return text === "" ? null : Number(text);
}

function compare(a, b, kind) {
  if (a === b) return 0;
  // Unknown values come last in either direction.
  if (a === null) return 1;
  if (b === null) return -1;
  return kind === "number" ? a - b : a.localeCompare(b);
}

function sort(table, button) {
  const header = button.closest("th");
  const { key, kind } = button.dataset;
  const first = kind === "number" && key !== "order" ? "descending" : "ascending";
  const other = first === "descending" ? "ascending" : "descending";
  const direction = header.getAttribute("aria-sort") === first ? other : first;
  for (const th of header.parentElement.children) th.setAttribute("aria-sort", th === header ? direction : "none");
  const body = table.tBodies[0];
  const sign = direction === "ascending" ? 1 : -1;
  const rows = [...body.rows].map((row) => [value(row, key, kind), row]);
  rows.sort(([a], [b]) => (a === null || b === null ? compare(a, b, kind) : sign * compare(a, b, kind)));
  body.append(...rows.map(([, row]) => row));
}

for (const table of document.querySelectorAll("table[data-sortable]")) {
  for (const button of table.tHead.querySelectorAll("button")) {
    button.disabled = false;
    button.addEventListener("click", () => sort(table, button));
  }
}

for (const input of document.querySelectorAll("input[data-filter]")) {
  const rows = [...document.getElementById(input.dataset.filter).tBodies[0].rows];
  const count = input.closest("label").querySelector("[data-filter-count]");
  input.closest("label").hidden = false;
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => row.dataset.search.includes(word));
      if (!row.hidden) shown += 1;
    }
    count.textContent = words.length ? `${shown} of ${rows.length}` : "";
  });
}
