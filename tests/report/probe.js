// Put into a page before its own scripts, this tells in <pre id=probe> what the page then did.
"use strict";
addEventListener("load", () => {
  const told = { charts: [], invalid: [] };
  const count = (chart, what) => chart.querySelectorAll(what).length;
  const all = Array.from(document.querySelectorAll(".chart"));
  for (const chart of all) {
    const box = chart.getBoundingClientRect();
    told.charts.push({
      section: chart.dataset.section,
      lines: count(chart, ".scatterlayer path.js-line"),
      areas: count(chart, ".scatterlayer path.js-fill"),
      marks: count(chart, ".scatterlayer .point"),
      bars: count(chart, ".barlayer .point path"),
      images: count(chart, ".heatmaplayer image"),
      width: Math.round(box.width), height: Math.round(box.height),
    });
    if (chart.data) {
      for (const problem of Plotly.validate(chart.data, chart.layout) || []) {
        told.invalid.push(problem.msg);
      }
    }
  }
  const change = (id, values) => {
    const element = document.getElementById(id);
    Object.assign(element, values);
    element.dispatchEvent(new Event("change"));
  };
  if (all.length) {
    const loss = all[0], timeline = all[all.length - 1];
    const timelineWas = count(timeline, ".barlayer .point path");
    document.querySelectorAll("button.run")[1].click();
    told.visible = loss.data.map((trace) => trace.visible !== false);
    change("axis", { value: "tokens" });
    told.tokens = loss.data.map((trace) => Array.from(trace.x));
    told.axisTitle = loss.layout.xaxis.title.text;
    change("logarithmic", { checked: true });
    told.logarithmic = all.map((chart) => chart.layout.yaxis.type === "log");
    change("timeline", { value: "1" });
    told.timeline = [timelineWas, count(timeline, ".barlayer .point path")];
    told.caption = document.querySelector(".chart[data-section=timelines] + figcaption").textContent;
  }
  told.overflow = document.documentElement.scrollWidth - innerWidth;
  told.background = getComputedStyle(document.body).backgroundColor;
  told.ink = all.length && all[0].layout ? getComputedStyle(all[0].querySelector(".xtick text")).fill : "";
  const failure = document.getElementById("failure");
  // The policy's violations are reported a moment later.
  setTimeout(() => {
    told.failure = failure.hidden ? "" : failure.textContent;
    const pre = document.createElement("pre");
    pre.id = "probe";
    pre.textContent = JSON.stringify(told);
    document.body.append(pre);
  }, 200);
});
