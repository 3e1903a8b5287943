"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = [...document.querySelectorAll(".plot")].filter((box) => figures[box.dataset.figure]);
  if (!plots.length || typeof Plotly === "undefined") return;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const drawn = new Set();

  // figures name colours of the page ("--c1", "--c1/0.3"); plotly wants their values
  const paint = (name) => {
    const [variable, part] = name.split("/");
    const value = getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
    if (!part) return value;
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(value.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${part})`;
  };
  const themed = (value) => {
    if (typeof value === "string") return /^--[a-z0-9]+(\/[0-9.]+)?$/.test(value) ? paint(value) : value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(themed);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v)]));
    return value;
  };

  const figureOf = (box) => {
    const { data, layout } = themed(figures[box.dataset.figure]);
    const narrow = box.clientWidth < 520;
    const lines = { gridcolor: paint("--grid"), linecolor: paint("--line"), tickcolor: paint("--line"), fixedrange: touch };
    for (const key of Object.keys(layout).filter((k) => /^[xy]axis\d*$/.test(k))) {
      layout[key] = { ...lines, ...layout[key] };
      if (key.startsWith("x")) layout[key] = { showgrid: false, showline: true, ...layout[key] };
    }
    return {
      data,
      layout: {
        ...layout,
        font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 12, color: paint("--muted") },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 8, r: 12, t: 10, b: 8 },
        showlegend: false,
        hoverlabel: { namelength: -1, bgcolor: paint("--card"), bordercolor: paint("--line"), font: { color: paint("--ink") } },
        dragmode: touch ? false : "zoom",
      },
    };
  };
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
  };
  const draw = (box, width) => {
    const figure = figureOf(box);
    if (typeof width === "number") figure.layout.width = width;
    Plotly.react(box, figure.data, figure.layout, config);
    drawn.add(box);
  };

  // a key shows or hides its curves
  const toggle = (event) => {
    const key = event.currentTarget;
    const box = key.closest(".chart").querySelector(".plot");
    const hidden = key.getAttribute("aria-pressed") !== "true";
    key.setAttribute("aria-pressed", String(hidden));
    for (const trace of figures[box.dataset.figure].data) {
      if ((trace.legendgroup || trace.name) === key.dataset.group) trace.visible = !hidden;
    }
    draw(box);
  };
  document.querySelectorAll(".keys button").forEach((key) => key.addEventListener("click", toggle));

  // a phone draws a chart when it comes near, not all of them at once
  const near = new IntersectionObserver((seen) => {
    for (const entry of seen) {
      if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
    }
  }, { rootMargin: "600px" });
  plots.forEach((box) => near.observe(box));
  dark.addEventListener("change", () => drawn.forEach((box) => draw(box)));
  addEventListener("beforeprint", () => plots.forEach((box) => draw(box, 650))); // a column of A4 and of Letter
  addEventListener("afterprint", () => plots.forEach((box) => draw(box)));
})();
