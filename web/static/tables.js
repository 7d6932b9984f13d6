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
  table.dispatchEvent(new Event("rows"));
}

for (const table of document.querySelectorAll("table[data-sortable]")) {
  for (const button of table.tHead.querySelectorAll("button")) {
    button.disabled = false;
    button.addEventListener("click", () => sort(table, button));
  }
}

// Which rows are shown: those that hold every word of the filter, and of these the first few until all are asked for.
function limit(table) {
  const input = document.querySelector(`input[data-filter="${table.id}"]`);
  const more = document.querySelector(`button[data-more="${table.id}"]`);
  const count = input?.closest("label").querySelector("[data-filter-count]");
  const none = document.querySelector(`[data-none="${table.id}"]`);
  const most = Number(table.dataset.first ?? Infinity);
  let all = false;

  function show() {
    const words = (input?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    let matching = 0;
    for (const row of table.tBodies[0].rows) {
      const matches = words.every((word) => row.dataset.search.includes(word));
      if (matches) matching += 1;
      row.hidden = !matches || (!all && matching > most);
    }
    if (count) count.textContent = words.length ? `${matching} of ${table.tBodies[0].rows.length}` : "";
    if (none) none.hidden = matching > 0;
    if (more) {
      more.hidden = all || matching <= most;
      more.textContent = `Show all ${matching}`;
    }
  }

  if (input) {
    input.closest("label").hidden = false;
    input.addEventListener("input", show);
  }
  more?.addEventListener("click", () => {
    all = true;
    const firstNew = [...table.tBodies[0].rows].find((row) => row.hidden);
    show();
    // The button goes away: the keyboard goes on at the first row it brought.
    firstNew?.querySelector("button")?.focus();
  });
  table.addEventListener("rows", show);
  show();
}

for (const table of document.querySelectorAll("table[data-sortable]")) limit(table);
