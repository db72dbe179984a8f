"use strict";
(function () {
  const failure = document.getElementById("failure");
  function failed(message) {
    failure.hidden = false;
    failure.textContent += message + " ";
  }
  window.addEventListener("error", (event) => failed(event.message));
  window.addEventListener("unhandledrejection", (event) => failed(String(event.reason)));
  document.addEventListener("securitypolicyviolation", (event) =>
    failed("refused to load " + event.blockedURI));

  const figures = JSON.parse(document.getElementById("figures").textContent);
  const charts = Array.from(document.querySelectorAll(".chart"));
  const figureOf = (chart) => figures[chart.dataset.section][Number(chart.dataset.index)];
  const config = {
    responsive: true, displaylogo: false,
    modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };

  // Colours that depend on the browser's light or dark scheme; everything else is in the figures.
  function template() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = {
      gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--line"),
      automargin: true,
    };
    return { layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--ink"), family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { bgcolor: color("--raised"), font: { color: color("--ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--quiet") },
      xaxis: axis, yaxis: axis,
    } };
  }

  function layoutOf(figure) {
    const base = { height: 300, margin: { l: 48, r: 12, t: 28, b: 40 }, showlegend: false };
    if (figure.by_step) {
      base.xaxis = { title: { text: "step" } };
      base.hovermode = "x unified";
    }
    return Object.assign(base, figure.layout, { template: template() });
  }

  function draw(chart) {
    const figure = figureOf(chart);
    chart.parentElement.querySelector("figcaption").textContent = figure.caption;
    // A copy, since the library writes into what it is given.
    Plotly.newPlot(chart, structuredClone(figure.traces), layoutOf(figure), config);
  }

  // The library comes after this script, so that its own errors are shown too.
  document.addEventListener("DOMContentLoaded", () => charts.forEach(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    charts.forEach((chart) => Plotly.relayout(chart, { template: template() })));

  document.querySelectorAll("button.run").forEach((button) =>
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      charts.filter((chart) => figureOf(chart).by_step).forEach((chart) => {
        const traces = figureOf(chart).traces
          .map((trace, index) => (trace.meta.run === Number(button.dataset.run) ? index : -1))
          .filter((index) => index >= 0);
        if (traces.length) Plotly.restyle(chart, { visible: shown }, traces);
      });
    }));

  document.getElementById("axis")?.addEventListener("change", (event) => {
    const tokens = event.target.value === "tokens";
    charts.filter((chart) => figureOf(chart).by_step).forEach((chart) => {
      const xs = figureOf(chart).traces.map((trace) => (tokens ? trace.meta.tokens : trace.x));
      const title = tokens ? "tokens" : "step";
      Plotly.update(chart, { x: xs }, { "xaxis.title.text": title, "xaxis.autorange": true });
    });
  });

  document.getElementById("logarithmic")?.addEventListener("change", (event) => {
    const update = { "yaxis.type": event.target.checked ? "log" : "linear",
                     "yaxis.autorange": true };
    charts.filter((chart) => figureOf(chart).logarithmic)
      .forEach((chart) => Plotly.relayout(chart, update));
  });

  document.getElementById("timeline")?.addEventListener("change", (event) => {
    const chart = document.querySelector('.chart[data-section="timelines"]');
    chart.dataset.index = event.target.value;
    draw(chart);
  });
})();
