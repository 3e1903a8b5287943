"use strict";
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  // plotly.js is compressed; the page's policy allows this script by its hash, as it allows no other
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const plotly = document.createElement("script");
  plotly.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(plotly);
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
    const titles = [];
    for (const key of Object.keys(layout).filter((k) => /^[xy]axis\d*$/.test(k))) {
      const axis = layout[key] = { ...lines, ...layout[key] };
      if (key.startsWith("x")) {
        layout[key] = { showgrid: false, showline: true, ...axis };
        continue;
      }
      // the title of a y axis stands above its upper end; its unit is beside the values when one points at them
      const id = key.replace("axis", "");
      const text = axis.title.text + (axis.type === "log" ? ", log scale" : "");
      titles.push({ text, xref: "paper", x: 0, xanchor: "left", yref: `${id} domain`, y: 1, yanchor: "bottom", showarrow: false, font: { size: narrow ? 11 : 12 } });
      for (const trace of data.filter((t) => (t.yaxis || "y") === id)) trace.hovertemplate ??= `%{y}${axis.ticksuffix}`;
      Object.assign(axis, { title: {}, ticksuffix: "" });
      if (axis.type === "log") axis.dtick = narrow ? 1 : "D2";
    }
    return {
      data,
      layout: {
        ...layout,
        annotations: titles,
        font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 12, color: paint("--muted") },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 8, r: 12, t: 24, b: 8 },
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

  // a key shows or hides its curves, or changes the scale; a page that loads itself again remembers what was chosen
  const buttons = [...document.querySelectorAll(".keys button")];
  const toggle = (key) => {
    const box = key.closest(".chart").querySelector(".plot");
    const { data, layout } = figures[box.dataset.figure];
    const on = key.getAttribute("aria-pressed") !== "true";
    key.setAttribute("aria-pressed", String(on));
    if (key.classList.contains("log")) layout.yaxis.type = on ? "log" : "linear";
    for (const trace of data) if ((trace.legendgroup || trace.name) === key.dataset.group) trace.visible = on;
    return box;
  };
  const chosen = new Set(history.state?.chosen);
  buttons.forEach((key, i) => {
    if (chosen.has(i)) toggle(key);
    key.addEventListener("click", () => {
      draw(toggle(key));
      chosen.delete(i) || chosen.add(i);
      history.replaceState({ chosen: [...chosen] }, "");
    });
  });

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
