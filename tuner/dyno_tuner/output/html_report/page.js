"use strict";
(async () => {
  const plots = [...document.querySelectorAll(".plot")];
  const text = (id) => document.getElementById(id).textContent;
  if (!plots.length) return;
  try {
    const packed = Uint8Array.from(atob(text("plotly").trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  } catch (error) {
    for (const plot of plots) plot.textContent = `No plot: ${error}. All numbers stand in the tables.`;
    return;
  }
  const figures = JSON.parse(text("figures"));
  const coloured = (value, style) => {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return value.map((v) => coloured(v, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, style)]));
  };
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    for (const plot of plots) {
      const figure = coloured(figures[plot.id], style);
      const axis = { gridcolor: "--line", zerolinecolor: "--line", linecolor: "--line" };
      const layout = { ...figure.layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: style.getPropertyValue("--text").trim(), family: "system-ui, sans-serif", size: 12 },
        hoverlabel: { align: "left" } };
      for (const name of ["xaxis", "yaxis"]) layout[name] = { ...coloured(axis, style), ...layout[name] };
      Plotly.react(plot, figure.data, layout, { responsive: true, displayModeBar: false });
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
