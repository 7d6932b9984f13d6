// Keeps a list of jobs fresh: fetches the same page again and puts its list in place, while the page is looked at.

const SOON_MS = 2000;
const LATER_MS = 15000;

async function refresh() {
  const region = document.querySelector("[data-live]");
  if (document.visibilityState === "visible" && !region.contains(document.activeElement)) {
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const fresh = page.querySelector("[data-live]");
        if (fresh && fresh.innerHTML !== region.innerHTML) region.replaceChildren(...fresh.childNodes);
        if (fresh) region.dataset.live = fresh.dataset.live;
      }
    } catch {
      // The server is away for a moment; the list stays as it was and the next round asks again.
    }
  }
  setTimeout(refresh, region.dataset.live === "soon" ? SOON_MS : LATER_MS);
}

setTimeout(refresh, SOON_MS);
