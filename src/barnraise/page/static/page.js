"use strict";
(() => {
  const news = document.getElementById("news");
  const chart = document.getElementById("chart");
  const picker = document.getElementById("curve-name");
  const comparison = document.getElementById("comparison");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let data = null;
  let plot = null;
  let lastNews = new Date();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clock = (moment) => moment.toLocaleTimeString();
  const shorten = (value) => (value == null ? "–" : String(Number(value.toPrecision(4))));

  // Put new HTML of the server into a part; keep the focus, open details and chosen boxes.
  function replace(name, html) {
    const part = document.getElementById(name);
    if (!part) return;
    const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
    const open = [...part.querySelectorAll("details[open]")].map((each) => each.id);
    const chosen = [...part.querySelectorAll("input:checked")].map((each) => each.id);
    const scrolls = [...part.querySelectorAll("ul, ol, pre")].map((each) => each.scrollTop);
    part.innerHTML = html;
    open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
    chosen.forEach((id) => { const box = document.getElementById(id); if (box) box.checked = true; });
    part.querySelectorAll("ul, ol, pre").forEach((each, place) => { each.scrollTop = scrolls[place] ?? 0; });
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }

  function axes(label) {
    const common = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    return [{ ...common, label, labelSize: 22 }, { ...common, size: 60 }];
  }

  function size(box) {
    return { width: Math.max(240, box.clientWidth), height: Math.min(360, Math.max(220, box.clientWidth * 0.45)) };
  }

  function drawMarks(drawn) {
    const { ctx, bbox } = drawn;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--warn");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    let group = null; // of numbers that would cover each other
    const groups = [];
    const places = data.marks.map((mark, place) => [Math.round(drawn.valToPos(mark.step, "x", true)), place + 1]);
    places.sort((a, b) => a[0] - b[0]).forEach(([x, number]) => {
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      if (group && x < group.right) group.numbers.push(number);
      else groups.push(group = { x, numbers: [number] });
      group.right = x + 10 * devicePixelRatio * (group.numbers.length + 0.5);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top + 14 * devicePixelRatio);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    });
    groups.forEach(({ x, numbers }) => ctx.fillText(numbers.join(" "), x, bbox.top + 11 * devicePixelRatio));
    ctx.restore();
  }

  function drawCurve() {
    if (!chart || !data) return;
    const curve = data.curves.find((each) => each.name === picker.value) ?? data.curves[0];
    plot?.destroy();
    plot = null;
    if (!curve) { chart.textContent = "No value was logged yet."; return; }
    chart.textContent = "";
    const options = {
      ...size(chart),
      scales: { x: { time: false } },
      axes: axes(data.counts),
      series: [
        { label: data.counts },
        { label: "raw", stroke: colour("--raw"), width: 1, points: { show: false }, value: (_, value) => shorten(value) },
        { label: "smoothed", stroke: colour("--accent"), width: 2, points: { show: false }, value: (_, value) => shorten(value) },
      ],
      hooks: { draw: [drawMarks] },
    };
    plot = new uPlot(options, [curve.steps, curve.values, curve.smooth], chart);
    const last = curve.values.at(-1);
    chart.setAttribute("aria-label", `Curve of ${curve.name} to ${data.counts} ${curve.steps.at(-1)}, last value ${shorten(last)}`);
  }

  function showChart(text) {
    data = JSON.parse(text);
    const names = data.curves.map((curve) => curve.name);
    if ([...picker.options].map((option) => option.value).join("\n") !== names.join("\n")) {
      const chosen = picker.value;
      picker.replaceChildren(...names.map((name) => new Option(name, name)));
      if (names.includes(chosen)) picker.value = chosen;
    }
    const list = document.getElementById("marks");
    list.replaceChildren(...data.marks.map((mark) => {
      const item = document.createElement("li");
      item.textContent = `${data.counts} ${mark.step}: ${mark.text}`;
      return item;
    }));
    drawCurve();
  }

  function compareCurves(compared) {
    const steps = [...new Set(compared.runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
    const columns = compared.runs.map((run) => {
      const values = new Map(run.steps.map((step, place) => [step, run.smooth[place]]));
      return steps.map((step) => values.get(step));
    });
    const hues = [215, 30, 140, 280, 0, 180, 55, 320];
    const light = dark.matches ? 68 : 40;
    const series = compared.runs.map((run, place) => ({
      label: run.name, stroke: `hsl(${hues[place % hues.length]} 70% ${light}%)`, width: 2,
      dash: place % 2 ? [8, 4] : [], spanGaps: true, points: { show: false }, value: (_, value) => shorten(value),
    }));
    comparison.textContent = "";
    plot = new uPlot({ ...size(comparison), scales: { x: { time: false } }, axes: axes("step"), series: [{ label: "step" }, ...series] }, [steps, ...columns], comparison);
  }

  function listen(address) {
    const source = new EventSource(address);
    source.addEventListener("part", (event) => {
      const [name, content] = JSON.parse(event.data);
      if (name === "failure") { news.textContent = `No news since ${clock(lastNews)}: ${content}`; return; }
      if (name === "closed") { source.close(); news.textContent = `The session is closed. This is the state of ${clock(lastNews)}.`; return; }
      lastNews = new Date();
      news.textContent = "";
      if (name === "chart") showChart(content);
      else if (name !== "fresh") replace(name, content);
    });
    source.addEventListener("error", () => {
      news.textContent = `The agent does not answer. This is the state of ${clock(lastNews)}.`;
    });
  }

  function redraw() {
    if (chart) drawCurve();
  }

  if (news?.dataset.updates) listen(news.dataset.updates);
  if (comparison) fetch(comparison.dataset.chart).then((answer) => answer.json()).then(compareCurves);
  picker?.addEventListener("change", drawCurve);
  dark.addEventListener("change", redraw);
  addEventListener("resize", () => { if (plot) plot.setSize(size(chart ?? comparison)); });
})();
