"use strict";
// Draws the charts of a report from its data, and lets them be explored. Texts come in through textContent alone.
(() => {
  const LANES = { compute: "compute", out: "copies out", in: "copies in" };
  const MOST_ZOOM = 1e5;  // of the keyboard
  const BYTES_WIDTH = 70;  // pixels of bytes as text, at most
  const LEAST_SPACE = 50, GAP = 14;  // pixels between ticks, and between their texts
  const EDGE = 40;  // pixels right of a chart, for half of a text
  const MOST_LEAP = 3;  // between the slowdowns of the two slowest plans, if both are drawn on one scale
  const MOST_BEYOND = 1.5;  // of the slowest plan's slowdown, up to which other planners are drawn on the same
  const charts = {};
  const byId = (id) => document.getElementById(id);
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const bytes = (n) => {
    for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
      if (Math.abs(n) >= size) return `${(n / size).toFixed(2)} ${unit}`;
    return `${Math.round(n)} B`;
  };
  const seconds = (s) => {
    if (Math.abs(s) < 5e-7) return "0.00 s";
    if (Math.abs(s) >= 1) return `${s.toFixed(2)} s`;
    return Math.abs(s) >= 1e-3 ? `${(s * 1e3).toFixed(1)} ms` : `${(s * 1e6).toFixed(0)} µs`;
  };
  const percent = (x) => `${(100 * x).toFixed(1)} %`;

  const unpacked = async (id) => {
    const packed = Uint8Array.from(atob(byId(id).textContent.trim()), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const element = (name, text, ...children) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    made.append(...children);
    return made;
  };

  const axis = (values, more) => ({
    stroke: () => style("--quiet"), grid: { stroke: () => style("--line"), width: 1 },
    ticks: { stroke: () => style("--line"), width: 1 }, values: (_, found) => found.map(values), ...more,
  });
  // Of times between ticks so far apart: one unit, and the digits that tell neighbours apart.
  const unitOf = (last) => (last >= 1 ? ["s", 1] : last >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6]);
  const digits = (apart) => Math.max(0, 1 - Math.floor(Math.log10(apart)));
  const timeAxis = () => axis(null, {
    values: (_, ticks, __, ___, apart) => {
      const [unit, size] = unitOf(ticks[ticks.length - 1]);
      return ticks.map((s) => `${Number((s / size).toFixed(digits(apart / size)))} ${unit}`);
    },
    // As many ticks as their texts leave room for.
    space: (chart, index, low, high, width) => {
      const [unit, size] = unitOf(high);
      chart.ctx.font = chart.axes[index].font[0];
      const text = `${(high / size).toFixed(digits(((high - low) * LEAST_SPACE) / width / size))} ${unit}`;
      return Math.max(chart.ctx.measureText(text).width / devicePixelRatio + GAP, LEAST_SPACE);
    },
  });
  const UP = { size: 84, space: 34 };
  const size = (place, height) => ({ width: Math.max(place.clientWidth, 200), height });
  const draw = (name, options, data) => {
    const place = byId(name);
    const height = options.height;
    const padding = [null, EDGE, null, null];
    const chart = new uPlot({ padding, ...options, ...size(place, height) }, data, place);
    new ResizeObserver(() => chart.setSize(size(place, height))).observe(place);
    charts[name] = chart;
    return chart;
  };
  // Ticks at whole multiples of a power of two, for bytes, as far apart as their texts need.
  const byteSplits = (chart, which, low, high) => {
    const most = which ? chart.height / UP.space : (chart.width - UP.size) / BYTES_WIDTH;
    const step = 2 ** Math.ceil(Math.log2(Math.max(high - low, 1) / Math.max(Math.min(most, 6), 1)));
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
    return found;
  };

  const outline = (width) => ({ stroke: () => style("--quiet"), width });
  const stepped = uPlot.paths.stepped({ align: 1 });
  const steppedBefore = uPlot.paths.stepped({ align: -1 });  // a bound holds for smaller budgets

  const drawWaterline = (data, choose) => {
    const starts = data.steps.start;
    const last = starts.length - 1;
    const x = [...starts, data.steps.end];
    const sums = data.stacked.map((row) => [...row, row[last]]);
    for (let c = 1; c < sums.length; c++) sums[c] = sums[c].map((n, k) => n + sums[c - 1][k]);
    const used = data.categories.map((_, c) => c).filter((c) => data.stacked[c].some((n) => n > 0)).reverse();
    // The outline of their sum also shows steps that take no time.
    const totals = starts.map((_, k) => data.stacked.reduce((sum, row) => sum + row[k], 0));
    let shown = totals.indexOf(Math.max(...totals));  // the step that is described where the pointer is elsewhere
    const present = (u) => (u.cursor.idx == null ? shown : stepAt(u));
    const series = used.map((c, k) => ({
      label: data.categories[c], fill: data.colours[c], ...outline(k ? 0 : 1), paths: stepped, points: { show: false },
      value: (u) => bytes(data.stacked[c][present(u)]),
    }));
    let columns = [x, ...used.map((c) => sums[c]), x.map(() => data.budget)];
    series.push({ label: data.budget_name, stroke: () => style("--bad"), width: 2, dash: [8, 5], points: { show: false },
      value: () => bytes(data.budget) });
    if (data.measured) {
      columns = uPlot.join([columns, [data.measured.s, data.measured.bytes]]);
      for (const s of series) s.spanGaps = true;
      const { s: moments, bytes: levels } = data.measured;
      const level = (s) => levels[Math.max(moments.findLastIndex((at) => at <= s), 0)];
      series.push({ label: "measured", stroke: () => style("--text"), width: 1.5, paths: stepped, spanGaps: true,
        points: { show: false }, value: (u) => bytes(level(starts[present(u)])) });
    }
    // The step under the pointer; the cursor's index is that of the nearest boundary.
    const stepAt = (chart) => {
      const at = chart.posToVal(chart.cursor.left, "x");
      let low = 0;
      for (let high = last; low < high; ) {
        const middle = (low + high + 1) >> 1;
        if (starts[middle] <= at) low = middle; else high = middle - 1;
      }
      return low;
    };
    const top = Math.max(data.budget, ...sums[sums.length - 1], ...(data.measured ? data.measured.bytes : []));
    const chart = draw("waterline", {
      height: 360, series: [{ value: (u, s) => seconds(s ?? starts[shown]), label: "time" }, ...series],
      scales: { x: { time: false }, y: { range: () => [0, top * 1.04] } },
      axes: [timeAxis(), axis(bytes, { ...UP, splits: byteSplits })],
      cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
      hooks: {
        setCursor: [(u) => u.cursor.idx != null && showMoment(data, (shown = stepAt(u)))],
        setScale: [(u, key) => key === "x" && follow(u)],
      },
    }, columns);
    const chosen = () => chart.cursor.idx != null && choose(data.steps.stage[stepAt(chart)]);
    chart.over.addEventListener("click", chosen);
    chartKeys(chart, chosen);
    chart.setLegend({ idx: null });
    showMoment(data, shown);
    choose(data.steps.stage[shown]);
  };

  const drawLanes = (data, choose) => {
    const { lane, what, stage, start, end } = data.events;
    const bounds = [...new Set([0, data.steps.end, ...start, ...end])].sort((a, b) => a - b);
    const at = new Map(bounds.map((s, k) => [s, k]));
    const x = bounds.flatMap((s) => [s, s]);
    const series = [];
    const columns = [x];
    const found = new Map();
    what.forEach((w, e) => {
      const key = `${w} ${stage[e] % 2}`;  // two shades, so that neighbours can be told apart
      if (!found.has(key)) {
        found.set(key, columns.length);
        columns.push(new Array(x.length).fill(null));
        const base = data.lanes.length - 1 - lane[e];
        const colour = data.shades[w] + ["", "b0"][stage[e] % 2];
        series.push({ label: data.whats[w], stroke: colour, fill: colour, width: 0, fillTo: () => base + 0.12,
          points: { show: false } });
      }
      const column = columns[found.get(key)];
      const level = data.lanes.length - lane[e] - 0.12;
      for (let k = 2 * at.get(start[e]) + 1; k <= 2 * at.get(end[e]); k++) column[k] = level;
    });
    const chart = draw("lanes", {
      height: 150, series: [{}, ...series], legend: { show: false },
      scales: { x: { time: false }, y: { range: () => [0, data.lanes.length] } },
      axes: [timeAxis(), axis((at) => LANES[data.lanes[data.lanes.length - 0.5 - at]], {
        ...UP, splits: () => data.lanes.map((_, k) => k + 0.5), grid: { show: false } })],
      cursor: { sync: { key: "step" }, drag: { x: true, y: false }, points: { show: false } },
      hooks: { setScale: [(u, key) => key === "x" && follow(u)] },
    }, columns);
    chart.over.addEventListener("click", () => {
      const now = chart.posToVal(chart.cursor.left, "x");
      const row = data.lanes.length - 1 - Math.floor(chart.posToVal(chart.cursor.top, "y"));
      const hit = start.findIndex((s, e) => lane[e] === row && s <= now && now < end[e]);
      if (hit >= 0) choose(stage[hit]);
    });
  };

  let following = false;
  const follow = (from) => {
    if (following) return;
    following = true;
    const { min, max } = from.scales.x;
    for (const name of ["waterline", "lanes"]) {
      const chart = charts[name];
      if (chart && chart !== from && (chart.scales.x.min !== min || chart.scales.x.max !== max))
        chart.setScale("x", { min, max });
    }
    following = false;
  };

  const showMoment = (data, step) => {
    const total = data.stacked.reduce((sum, row) => sum + row[step], 0);
    const { storage, first, last, category } = data.stays;
    const there = storage.map((_, k) => k).filter((k) => first[k] <= step && step <= last[k]);
    there.sort((a, b) => data.storages[storage[b]][1] - data.storages[storage[a]][1]);
    const { name } = data.stages[data.steps.stage[step]];
    const called = name.startsWith("(") ? `what runs ${name.slice(1, -1)}` : name;
    const phase = data.phases[data.steps.phase[step]];
    const what = phase === "update" ? "update" : `${phase}${data.steps.again[step] ? ", made again" : ""} of ${called}`;
    const spare = data.budget - total;
    const lines = there.slice(0, 8).map((k) => {
      const [called, n, origin] = data.storages[storage[k]];
      return element("li", `${bytes(n)}  ${called}${origin ? ` (${origin})` : ""}: ${data.categories[category[k]]}`);
    });
    if (there.length > 8) lines.push(element("li", `and ${there.length - 8} smaller ones`));
    byId("moment").replaceChildren(
      element("strong", `${what}: ${bytes(total)}`),
      ` of ${bytes(data.budget)}, ${spare < 0 ? `${bytes(-spare)} too many` : `${bytes(spare)} free`}`,
      element("ul", "", ...lines),
    );
  };

  const showStage = (data, number, focus) => {
    const buttons = byId("strip").children;
    for (const each of byId("strip").querySelectorAll("[aria-selected=true]")) {
      each.setAttribute("aria-selected", "false");
      each.tabIndex = -1;
    }
    buttons[number].setAttribute("aria-selected", "true");
    buttons[number].tabIndex = 0;
    if (focus) buttons[number].focus();
    const stage = data.stages[number];
    const lines = stage.facts.map((fact) => element("li", fact));
    for (const [text, key] of [["", "price"], ["With less memory: ", "leaner"], ["With more memory: ", "richer"]])
      if (stage[key]) lines.push(element("li", text + stage[key]));
    if (stage.like) lines.push(element("li", stage.like));
    byId("why").replaceChildren(
      element("strong", stage.name), ` ${stage.option}`, element("ul", "", ...lines));
  };

  const stripKeys = (data, choose) => {
    const strip = byId("strip");
    strip.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) choose([...strip.children].indexOf(button));
    });
    strip.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const now = [...strip.children].indexOf(document.activeElement);
      const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: data.stages.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      showStage(data, Math.min(Math.max(to, 0), data.stages.length - 1), true);
    });
  };

  const chartKeys = (chart, choose) => {
    const place = byId("waterline");
    place.addEventListener("keydown", (event) => {
      const { min, max } = chart.scales.x;
      const all = chart.data[0];
      const zoom = (factor) => {
        const middle = chart.cursor.idx == null ? (min + max) / 2 : all[chart.cursor.idx];
        const whole = all[all.length - 1] - all[0];
        const half = Math.min(Math.max((max - min) * factor, whole / MOST_ZOOM), whole) / 2;
        const low = Math.min(Math.max(middle - half, all[0]), all[all.length - 1] - 2 * half);
        chart.setScale("x", { min: low, max: low + 2 * half });
      };
      const move = (by) => {
        const k = Math.min(Math.max((chart.cursor.idx ?? 0) + by, 0), all.length - 1);
        chart.setCursor({ left: chart.valToPos(all[k], "x") + 0.5, top: 10 });
      };
      const keys = { ArrowRight: () => move(1), ArrowLeft: () => move(-1), "+": () => zoom(0.5), "=": () => zoom(0.5),
        "-": () => zoom(2), Enter: choose, 0: () => chart.setScale("x", { min: all[0], max: all[all.length - 1] }) };
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
  };

  // Up to the slowest plan, but for plans and planners that would flatten the others.
  const slowest = (plans, others) => {
    const found = [...plans].sort((a, b) => b - a);
    while (found.length > 2 && found[1] >= 1 && found[0] > MOST_LEAP * found[1]) found.shift();
    const all = Math.max(found[0], ...others);
    return Math.max(all <= MOST_BEYOND * found[0] ? all : found[0], 1);
  };
  const beyond = (series, top) => {
    const told = series.map(([name, found]) => [name, found.filter((y) => y > top)]).filter(([, y]) => y.length);
    const range = (y) => [...new Set([Math.min(...y), Math.max(...y)].map((at) => `${at.toFixed(1)} %`))].join(" to ");
    return told.length ? `Above the chart: ${told.map(([name, y]) => `${name}, ${range(y)}`).join("; ")}.` : "";
  };

  const drawFrontier = (data) => {
    const { plans, others, baseline } = data.frontier;
    const slow = (s) => 100 * (s / baseline - 1);
    const names = [...new Set(others.map((o) => o.name))];
    const peaks = [...new Set([...plans, ...others].map((p) => p.peak))].sort((a, b) => a - b);
    const column = (points, value) => {
      const found = new Map(points.map((p) => [p.peak, value(p)]));
      return peaks.map((peak) => found.get(peak) ?? null);
    };
    const marks = ["#d55e00", "#cc79a7", "#009e73", "#e69f00"];
    const slider = byId("point");
    const chosenPeak = () => peaks.indexOf(plans[Number(slider.value)].peak);
    const shown = (u, y, k, at) => {
      const slower = at == null ? u.data[k][chosenPeak()] : y;
      return slower == null ? "no plan" : `${slower.toFixed(1)} %`;
    };
    const chosen = { label: "chosen", stroke: () => style("--text"), width: 0, points: { show: true, size: 13, width: 3 },
      value: shown };
    const series = [
      { label: "peak", value: (_, n) => bytes(n ?? peaks[chosenPeak()]) },
      { label: "best plan found", stroke: "#0072b2", width: 2, spanGaps: true, paths: stepped, value: shown,
        points: { show: true, size: 7, fill: "#0072b2" } },
      { label: "proven bound", stroke: () => style("--quiet"), dash: [6, 4], spanGaps: true, paths: steppedBefore,
        points: { show: false }, value: shown },
      ...names.map((name, k) => ({ label: name, stroke: marks[k % marks.length], width: 0, value: shown,
        points: { show: true, size: 9, fill: marks[k % marks.length] } })),
      chosen,
    ];
    const columns = [
      peaks, column(plans, (p) => slow(p.s)), column(plans, (p) => Math.max(slow(p.bound), 0)),
      ...names.map((name) => column(others.filter((o) => o.name === name), (o) => slow(o.s))), peaks.map(() => null),
    ];
    const all = [["best plan found", plans.map((p) => slow(p.s))],
      ...names.map((name) => [name, others.filter((o) => o.name === name).map((o) => slow(o.s))])];
    const most = slowest(all[0][1], all.slice(1).flatMap(([, found]) => found));
    const bottom = Math.min(0, ...all.flatMap(([, found]) => found));
    const top = () => 1.08 * Math.max(most, slow(plans[Number(slider.value)].s));
    const chart = draw("frontier", {
      height: 320, series, scales: { x: { time: false }, y: { range: () => [bottom, top()] } },
      axes: [axis(bytes, { splits: byteSplits }), axis((y) => `${y} %`, UP)],
    }, columns);
    slider.max = plans.length - 1;
    const [unit, size] = plans[plans.length - 1].peak - plans[0].peak < 2 ** 30 ? ["MiB", 2 ** 20] : ["GiB", 2 ** 30];
    const choose = () => {
      const k = Number(slider.value);
      const plan = plans[k];
      const next = plans[k + 1];
      const gain = next && (plan.s - next.s) / (next.peak - plan.peak);
      columns[columns.length - 1] = column([plan], (p) => slow(p.s));
      chart.setData(columns);
      chart.setLegend({ idx: null });
      byId("beyond").textContent = beyond(all, top());
      byId("told").textContent =
        `${bytes(plan.peak)}: ${seconds(plan.s)} a step, ${percent(plan.s / baseline - 1)} slower than with everything ` +
        `kept; ${plan.bound ? `at most ${percent(plan.s / plan.bound - 1)} above the optimum` : "no bound is known"}` +
        (next ? `; one ${unit} more saves ${seconds(gain * size)}` : "; more memory saves nothing");
    };
    slider.addEventListener("input", choose);
    slider.value = data.frontier.chosen;
    choose();
  };

  const drawPhases = (data) => {
    const count = data.phases.length;
    const sums = data.bytes.map((row) => [...row]);
    for (let c = 1; c < sums.length; c++) sums[c] = sums[c].map((n, k) => n + sums[c - 1][k]);
    const used = data.categories.map((_, c) => c).filter((c) => data.bytes[c].some((n) => n > 0)).reverse();
    const bars = uPlot.paths.bars({ size: [0.7, 90] });
    const totals = sums[sums.length - 1];
    const top = Math.max(data.capacity || 0, ...totals);
    const peak = totals.indexOf(Math.max(...totals));  // the phase of the legend where the pointer is elsewhere
    const series = used.map((c) => ({ label: data.categories[c], fill: data.colours[c], ...outline(1), paths: bars,
      points: { show: false }, value: (_, __, ___, k) => bytes(data.bytes[c][k ?? peak]) }));
    const columns = [data.phases.map((_, k) => k), ...used.map((c) => sums[c])];
    if (data.capacity) {
      series.push({ label: "the device has", stroke: () => style("--bad"), width: 2, dash: [8, 5],
        points: { show: false }, value: () => bytes(data.capacity) });
      columns.push(data.phases.map(() => data.capacity));
    }
    const chart = draw("phases", {
      height: 360, series: [{ label: "phase", value: (_, k) => data.phases[k ?? peak] }, ...series],
      scales: { x: { time: false, range: () => [-0.6, count - 0.4] }, y: { range: () => [0, top * 1.04] } },
      axes: [axis((k) => data.phases[k] ?? "", { splits: () => data.phases.map((_, k) => k), rotate: -25, size: 80,
        grid: { show: false } }), axis(bytes, { ...UP, splits: byteSplits })],
      cursor: { drag: { x: false, y: false } },
    }, columns);
    chart.setLegend({ idx: null });
  };

  const download = async (button) => {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([await unpacked(button.dataset.file)], { type: "application/json" }));
    link.download = button.dataset.name;
    link.click();
    URL.revokeObjectURL(link.href);
  };

  const start = async () => {
    for (const button of document.querySelectorAll(".download"))
      button.addEventListener("click", () => download(button));
    const data = JSON.parse(await unpacked("data"));
    if (data.steps) {
      const choose = (number) => showStage(data, number, false);
      drawWaterline(data, choose);
      drawLanes(data, choose);
      stripKeys(data, choose);
    }
    if (data.frontier) drawFrontier(data);
    if (data.bytes) drawPhases(data);
    const redraw = () => Object.values(charts).forEach((chart) => chart.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    for (const [event, on] of [["beforeprint", true], ["afterprint", false]]) {
      addEventListener(event, () => {
        document.documentElement.toggleAttribute("data-print", on);
        for (const each of document.querySelectorAll("details")) each.open = on;
        redraw();
      });
    }
    window.report = { data, charts };
    document.documentElement.dataset.drawn = "yes";
  };
  start();
})();
