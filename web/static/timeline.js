// Draws the HBM timeline with Plotly over the server's drawing, in the page's own colours, and shows a buffer's lifetime on it.

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 760px)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A label is shown where its span is wide enough for it, at about six pixels a letter.
function fits(span, data, width) {
  return ((span.end - span.start) / data.last) * width > 6 * span.name.length + 8;
}

function layout(data, lifetime, width) {
  const ink = colour("--ink-2");
  const top = Math.max(...data.y) * 1.12;
  const line = (x0, x1, y0, y1, style) => ({ type: "line", x0, x1, y0, y1, line: style });
  const shapes = data.spans.map((span) => ({
    type: "rect", xref: "x", yref: "paper", x0: span.start, x1: span.end, y0: 0, y1: 1,
    fillcolor: colour("--ink"), opacity: 0.05, line: { width: 0 }, layer: "below",
  }));
  const annotations = data.spans.filter((span) => fits(span, data, width)).map((span) => ({
    x: span.start, xanchor: "left", xshift: 4, y: 0, yref: "paper", yanchor: "bottom", yshift: 2,
    text: span.name, showarrow: false, font: { size: 11, color: ink },
  }));
  shapes.push(line(data.peak.x, data.peak.x, 0, data.peak.y, { color: colour("--peak"), width: 1, dash: "dot" }));
  annotations.push({
    x: data.peak.x, y: data.peak.y, text: data.peak.label, showarrow: false, yanchor: "bottom", yshift: 7,
    xanchor: data.peak.x > data.last / 2 ? "right" : "left", xshift: data.peak.x > data.last / 2 ? 6 : -6,
    font: { size: 13, color: colour("--ink") },
  });
  if (data.capacity !== null && data.capacity <= top) {
    shapes.push(line(0, data.last, data.capacity, data.capacity, { color: colour("--limit"), width: 1.5, dash: "dash" }));
    annotations.push({
      x: 0, xanchor: "left", y: data.capacity, yanchor: "bottom", text: "capacity", showarrow: false, font: { size: 11, color: colour("--limit") },
    });
  }
  if (lifetime) {
    shapes.push({
      type: "rect", xref: "x", yref: "paper", x0: lifetime.start, x1: Math.max(lifetime.end, lifetime.start + data.last / 400), y0: 0, y1: 1,
      fillcolor: lifetime.colour, opacity: 0.28, line: { width: 0 },
    });
  }
  return {
    margin: { l: narrow.matches ? 48 : 56, r: 12, t: 10, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
    xaxis: { range: [0, data.last], title: { text: "program point", standoff: 6 }, showgrid: false, zeroline: false, linecolor: colour("--rule-strong"), ticks: "outside", tickcolor: colour("--rule-strong"), ticklen: 4 },
    yaxis: { ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)", range: [0, top], ticksuffix: narrow.matches ? "" : " GiB", title: narrow.matches ? { text: "GiB", standoff: 2 } : undefined, gridcolor: colour("--rule"), zeroline: false, fixedrange: true },
    hoverlabel: { bgcolor: colour("--surface"), bordercolor: colour("--rule-strong"), font: { color: colour("--ink") }, align: "left" },
    hovermode: "x", dragmode: narrow.matches ? false : "zoom", showlegend: false, shapes, annotations,
  };
}

function traces(data) {
  const accent = colour("--accent");
  return [
    { x: data.x, y: data.y, text: data.text, hovertemplate: "%{text}<extra></extra>", mode: "lines", line: { shape: "hv", width: 1.6, color: accent }, fill: "tozeroy", fillcolor: colour("--accent-area") },
    { x: [data.peak.x], y: [data.peak.y], mode: "markers", marker: { size: 10, color: colour("--peak"), line: { width: 2, color: colour("--surface") } }, hoverinfo: "skip", name: "peak" },
  ];
}

function start(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  let lifetime = null;
  const draw = () => window.Plotly.react(plot, traces(data), layout(data, lifetime, plot.clientWidth - 68), { displayModeBar: false, responsive: true, doubleClick: "reset" });
  plot.hidden = false;
  document.querySelector(".zoom-hint").hidden = false;
  figure.querySelector(".drawing").hidden = true;
  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);

  const buttons = [...document.querySelectorAll("button[data-show]")];
  for (const button of buttons) {
    button.disabled = false;
    button.addEventListener("click", () => {
      const pressed = button.getAttribute("aria-pressed") === "true";
      for (const other of buttons) other.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-pressed", String(!pressed));
      const row = button.closest("tr");
      lifetime = pressed ? null : {
        start: Number(row.dataset.start), end: Number(row.dataset.end),
        colour: getComputedStyle(button.querySelector(".seg")).fill,
      };
      draw();
    });
  }
}

const figure = document.querySelector("[data-timeline]");
// The server's drawing stays where Plotly could not be loaded.
if (figure && window.Plotly) start(figure);
