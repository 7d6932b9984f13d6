// Follows a running job: adds each event to the list as it happens, and loads the page again when the job has ended.

const panel = document.querySelector("[data-progress]");

function describe(name, data) {
  if (name === "progress") return [data.name.replaceAll("_", " "), `${data.program} · ${data.seconds.toFixed(1)} s`];
  const known = ["status", "program", "attempt", "worker", "reason"].filter((key) => data[key] !== undefined && data[key] !== null);
  return [name.replaceAll("_", " "), known.map((key) => `${key} ${data[key]}`).join(" · ")];
}

if (panel) {
  const list = panel.querySelector("[data-steps]");
  const source = new EventSource(`${panel.dataset.events}?after=${panel.dataset.after}`);
  const names = ["queued", "claimed", "progress", "report", "cancel_requested", "released", "lease_lost", "finished"];
  for (const name of names) {
    source.addEventListener(name, (event) => {
      const [title, detail] = describe(name, JSON.parse(event.data));
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
