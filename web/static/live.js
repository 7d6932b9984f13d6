// Keeps a list of jobs fresh: fetches the same page again and puts its list in place, while the page is looked at.

const SOON_MS = 2000;
const LATER_MS = 15000;

// What the reader ticked, and the box that has the keyboard, are the same boxes in the fresh list.
function replace(region, fresh) {
  const focused = document.activeElement.value;
  const ticked = new Set([...region.querySelectorAll("input:checked")].map((box) => box.value));
  region.replaceChildren(...fresh.childNodes);
  for (const box of region.querySelectorAll("input[type=checkbox]")) {
    box.checked = ticked.has(box.value);
    if (box.value === focused) box.focus();
  }
}

async function refresh() {
  const region = document.querySelector("[data-live]");
  const active = document.activeElement;
  const isRead = region.contains(active) && active.type !== "checkbox";
  if (document.visibilityState === "visible" && !isRead) {
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const fresh = page.querySelector("[data-live]");
        if (fresh && fresh.innerHTML !== region.innerHTML) replace(region, fresh);
        if (fresh) region.dataset.live = fresh.dataset.live;
      }
    } catch {
      // The server is away for a moment; the list stays as it was and the next round asks again.
    }
  }
  setTimeout(refresh, region.dataset.live === "soon" ? SOON_MS : LATER_MS);
}

setTimeout(refresh, SOON_MS);
