// Follows a running job: tells its state and phase, adds each event to the list as it happens, and loads the page again when it has ended.

const panel = document.querySelector("[data-progress]");

function describe(name, data) {
  if (name === "progress" && data.program === "steps") return describeSteps(data.name, data.data, data.seconds);
  if (name === "progress") return [data.name.replaceAll("_", " "), `${data.program} · ${data.seconds.toFixed(1)} s`];
  const known = ["status", "program", "attempt", "worker", "reason"].filter((key) => data[key] !== undefined && data[key] !== null);
  return [name.replaceAll("_", " "), known.map((key) => `${key} ${data[key]}`).join(" · ")];
}

// Null for what is not worth a line.
function describeSteps(name, data, seconds) {
  if (name === "known") return null;
  if (name === "step") {
    const last = data.steps.at(-1);
    return ["step", `step ${last.step}, loss ${last.metrics.loss ?? "not finite"}`];
  }
  if (name === "check") return ["check", `${data.name.replaceAll("_", " ")}: ${data.status.replaceAll("_", " ")}`];
  return [name, `${seconds.toFixed(1)} s`];
}

// Draws the curves of real steps again from a fresh page, at most every two seconds.
let isRefreshing = false;
function refreshCurves() {
  const shown = document.querySelector("[data-live]");
  if (!shown || isRefreshing) return;
  isRefreshing = true;
  setTimeout(async () => {
    try {
      const answer = await fetch(location.href);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("[data-live]");
      if (answer.ok && fresh) shown.replaceWith(fresh);
    } catch {
      // The server is away for a moment, or this page is being left; the next event asks again.
    }
    isRefreshing = false;
  }, 2000);
}

// The state in the headline: which of the two the server wrote is shown, and the phase in the words it gave.
function tellState(name, data) {
  const phase = panel.querySelector("[data-phase]");
  const words = JSON.parse(panel.dataset.words)[data.name];
  const isRunning = { claimed: true, progress: true, released: false, lease_lost: false }[name];
  if (isRunning !== undefined) {
    for (const state of document.querySelectorAll("[data-state]")) state.hidden = (state.dataset.state === "running") !== isRunning;
    if (isRunning) panel.querySelector("[data-nobody]")?.remove();
  }
  if (isRunning === false || name === "claimed") phase.textContent = "";
  if (name === "progress" && words) phase.textContent = data.program === "steps" ? words : `${words} ${data.program}`;
  if (name === "cancel_requested") panel.querySelector("[data-cancelling]").hidden = false;
}

if (panel) {
  const list = panel.querySelector("[data-steps]");
  const source = new EventSource(`${panel.dataset.events}?after=${panel.dataset.after}`);
  const names = ["queued", "claimed", "progress", "report", "cancel_requested", "released", "lease_lost", "finished"];
  for (const name of names) {
    source.addEventListener(name, (event) => {
      const data = JSON.parse(event.data);
      const line = describe(name, data);
      tellState(name, data);
      refreshCurves();
      if (!line) return;
      const [title, detail] = line;
      const item = document.createElement("li");
      const note = document.createElement("span");
      note.className = "dim";
      note.textContent = detail;
      item.append(`${title} `, note);
      list.append(item);
      if (name === "report" || name === "finished") {
        if (name === "finished") source.close();
        location.reload();
      }
    });
  }
}
