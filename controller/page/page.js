"use strict";
// Every two seconds: fetch what the page shows, put the pieces in place, let plotly.js draw.
const PERIOD_MS = 2000;
const CONFIG = { displayModeBar: false, responsive: true };
const dark = matchMedia("(prefers-color-scheme: dark)");
let newest = null;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function title(axis) {
  return { ...axis.title, standoff: 8, font: { size: 11, color: colour("--muted") } };
}

function layout(own) {
  const axis = { gridcolor: colour("--faint"), linecolor: colour("--faint"), zeroline: false, automargin: true };
  return {
    ...own,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: "system-ui, DejaVu Sans, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--faint"), font: { color: colour("--ink") } },
    margin: { l: 56, r: 12, t: 28, b: 40 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    showlegend: true,
    xaxis: { ...axis, ...own.xaxis, title: title(own.xaxis) },
    yaxis: { ...axis, ...own.yaxis, title: title(own.yaxis) },
  };
}

function draw() {
  const plots = Object.entries(newest.figures);
  return Promise.all(plots.map(([id, figure]) => Plotly.react(id, figure.data, layout(figure.layout), CONFIG)));
}

async function refresh() {
  try {
    // Of the origin: a page whose address holds a password may not fetch relative to it.
    const answer = await fetch(location.origin + "/live.json" + location.search);
    if (!answer.ok) throw new Error((await answer.json()).error);
    newest = await answer.json();
    for (const [id, html] of Object.entries(newest.html)) {
      document.getElementById(id).innerHTML = html;
    }
    await draw();
    document.getElementById("away").hidden = true;
    document.body.dataset.state = "live";
  } catch (error) {
    const away = document.getElementById("away");
    away.textContent = error instanceof TypeError ? "the sidecar does not answer" : error.message;
    away.hidden = false;
    document.body.dataset.state = "away";
  }
  setTimeout(refresh, PERIOD_MS);
}

document.getElementById("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const asked = new FormData(event.target).get("request");
  location.href = `/explain/${asked}${location.search}`;
});
dark.addEventListener("change", () => newest && draw());
refresh();
