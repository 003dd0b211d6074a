// All charts. Each is a function that draws into its box, and is called again when a run is shown or hidden.

/** A colour of the page, light or dark. */
const ofPage = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const FONT = { family: 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', size: 12, color: ofPage("soft") };
const PLOT_SETTINGS = { displayModeBar: false, responsive: true };
const PHASES = { sync: "#8d95a1", generate: "#4c86c6", score: "#9cc3e6", pack: "#e2c47c", train: "#d9793f",
  evaluate: "#6bab84", checkpoint: "#a57fbf", export: "#c9a5d6", rest: "#dfe2e6" };
const MEMORY = { sync: "#8d95a1", generate: "#4c86c6", train: "#d9793f", residue: "#2f8f5b" };
const drawings = [];

/** Draw now, and again whenever the runs on show change. */
function keepDrawn(draw) {
  drawings.push(draw);
  draw();
}

function redrawCharts() {
  drawings.forEach((draw) => draw());
}

function layout(more = {}) {
  const axis = { gridcolor: ofPage("grid"), zerolinecolor: ofPage("border"), linecolor: ofPage("border"), automargin: true, tickfont: FONT };
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  return { font: FONT, margin: { l: 46, r: 10, t: 8, b: 34 }, paper_bgcolor: ofPage("card"), plot_bgcolor: ofPage("card"), hovermode: "x unified",
    hoverlabel: { bgcolor: ofPage("card"), bordercolor: ofPage("border"), font: { ...FONT, color: ofPage("ink") } }, showlegend: false,
    xaxis: { ...axis, showgrid: false, zeroline: false, nticks: 8, title: { text: "step", font: FONT, standoff: 4 }, ...xaxis },
    yaxis: { ...axis, ...yaxis }, ...rest };
}

/** A card with a title, a line of explanation and room for a plot; `key` are [label, dash, colour] of its line styles. */
function chartCard(box, title, note, key = []) {
  const legend = make("span", "key");
  for (const [label, dash, colour] of key) {
    const item = make("span");
    const pattern = { solid: "none", dot: "2 3", dash: "6 4" }[dash];
    item.innerHTML = `<svg width="22" height="8"><line x1="0" x2="22" y1="4" y2="4" stroke="${colour || FONT.color}" stroke-width="2" stroke-dasharray="${pattern}"/></svg>`;
    item.append(label);
    legend.append(item);
  }
  const plot = make("div", "plot");
  box.append(make("div", "card chart", {}, make("h4", "", {}, title), make("p", "", {}, note), key.length ? legend : null, plot));
  return plot;
}

/** The line under a group of charts that names what never changes, so that no space is spent on flat lines. */
function constants(box) {
  const next = box.nextElementSibling;
  if (next && next.classList.contains("constants")) return next;
  const line = make("p", "note constants", {}, "The same in every step of every run, so not drawn: ");
  box.after(line);
  return line;
}

/** Points of a metric where it is known, so that a line connects evaluations that are steps apart. */
function points(run, key) {
  const values = run.metrics[key] || [];
  const kept = values.map((_, i) => i).filter((i) => values[i] !== null);
  return { x: kept.map((i) => run.metrics.step[i]), y: kept.map((i) => values[i]) };
}

/** Lines of some metrics over the steps: a colour per run, a dash per metric. `series` are [key, label, dash]. */
function lineChart(box, title, note, series, yaxis = {}) {
  const present = series.filter(([key]) => RUNS.some((run) => known(run.metrics[key]).length));
  if (!present.length) return;
  const values = [...new Set(present.flatMap(([key]) => RUNS.flatMap((run) => known(run.metrics[key]))))];
  if (values.length === 1 && RUNS.some((run) => known(run.metrics[present[0][0]]).length > 1)) {
    constants(box).append(make("span", "", {}, `${title}: ${short(values[0])}`));
    return;
  }
  const plot = chartCard(box, title, note, present.length > 1 ? present.map(([, label, dash]) => [label, dash]) : []);
  keepDrawn(() => {
    const traces = RUNS.filter((run) => run.shown).flatMap((run) => present.map(([key, label, dash]) => {
      const { x, y } = points(run, key);
      return { x, y, type: "scatter", mode: x.length < 40 ? "lines+markers" : "lines",
        name: present.length > 1 ? `${run.name}, ${label}` : run.name, marker: { size: 4 },
        line: { color: run.colour, width: 1.8, dash }, hovertemplate: "%{y:.4~g}" };
    })).filter((trace) => trace.x.length);
    Plotly.react(plot, traces, layout({ yaxis: yaxis.type === "log" ? logAxis(values) : yaxis }), PLOT_SETTINGS);
  });
}

/** A logarithmic axis that labels powers of ten, and 2 and 5 between them where there are few. */
function logAxis(values) {
  const logs = values.filter((value) => value > 0).map(Math.log10);
  const decades = logs.length ? Math.max(...logs) - Math.min(...logs) : 1;
  return decades > 1.5 ? { type: "log", tickformat: ".0e", dtick: Math.ceil(decades / 6) } : { type: "log", dtick: "D2" };
}

const LOG = { type: "log" }; // logAxis fits it to the values
const SHARE = { rangemode: "tozero" };

function drawLearning() {
  const box = byId("learning-charts");
  const one = (key, label = "") => [[key, label, "solid"]];
  lineChart(box, "Reward", "mean over the step's samples", one("reward/mean"));
  const dashes = ["solid", "dot", "dash"];
  lineChart(box, "Supervised loss, teacher KL", "per token", [["loss/nll", "loss", "solid"], ["loss/kl_teacher", "KL to the teacher", "dot"]]);
  const perSet = (figure) => evalKeys(figure).map((key, i) => [key, key.split("/")[1], dashes[i % 3]]);
  lineChart(box, "Held-out accuracy", "share of right responses", perSet("accuracy"), { range: [0, 1.02] });
  lineChart(box, "Held-out reward", "mean, of sets with graded rewards", perSet("reward"));
  const rates = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].filter((key) => /^source\/.+\/pass_rate$/.test(key));
  lineChart(box, "Pass rate per source", "share of right samples",
    rates.sort().map((key, i) => [key, key.split("/")[1], dashes[i % 3]]), { range: [0, 1.02] });
  lineChart(box, "Response length", "sampled tokens per sample, mean", one("rollout/response_tokens_mean"), SHARE);
  lineChart(box, "Entropy", "nats per sampled token, mean", one("policy/entropy"), SHARE);
  lineChart(box, "Groups without signal, truncated samples", "all rewards of the group equal; cut at the length limit",
    [["reward/group_zero_std_frac", "no signal", "solid"], ["rollout/truncated_frac", "truncated", "dot"]], SHARE);
  lineChart(box, "Gradient norm", "before clipping", [["optim/grad_norm", "all", "solid"], ["optim/router_grad_norm", "routers", "dot"]], SHARE);
  lineChart(box, "Clipped tokens, KL", "share of loss tokens out of bounds; KL to the reference",
    [["loss/clip_frac", "clipped", "solid"], ["loss/kl_ref", "KL", "dot"]], SHARE);
  lineChart(box, "Turns per conversation", "messages of the model, mean", one("env/turns_mean"), SHARE);
  for (const key of DATA.users) lineChart(box, key, DATA.glossary[key], one(key));
}

function drawMismatch() {
  const box = byId("mismatch-charts");
  lineChart(box, "k3 of all tokens", "mean of exp(D) − D − 1, as trained", [["mismatch/k3", "", "solid"]], LOG);
  lineChart(box, "k3 with and without replay", "the same sampled tokens, replayed and routed live",
    [["mismatch/k3_replay", "replay", "solid"], ["mismatch/k3_live", "live", "dot"]], LOG);
  lineChart(box, "Live k3 / replayed k3", "above 1: replay lowers the mismatch", [["mismatch/k3_ratio", "", "solid"]], LOG);
  lineChart(box, "|D|, tail", "99th percentile and largest over the sampled tokens",
    [["mismatch/abs_p99", "p99", "solid"], ["mismatch/abs_max", "max", "dot"]], LOG);
  lineChart(box, "Tokens off by more than a factor of 2", "f2: share of tokens with |D| > ln 2",
    [["mismatch/f2_replay", "replay", "solid"], ["mismatch/f2_live", "live", "dot"]], SHARE);
  const dashes = { "0-1k": "solid", "1-4k": "dash", "4-16k": "dashdot", "16k_up": "dot" };
  const byDepth = (name) => Object.entries(dashes).map(([depth, dash]) => [`${name}_depth/${depth}`, depth, dash]);
  lineChart(box, "|D| by position", "mean per range of positions in the conversation", byDepth("mismatch/abs_mean"), LOG);
  lineChart(box, "Agreement by position", "share of slots whose live top-k is the replayed set", byDepth("routing/agreement"));
  lineChart(box, "Effective sample size", "of the weights exp(D); 1 is best", [["mismatch/ess", "", "solid"]]);
}

/** Layers of a run with an agreement metric, ascending. */
function agreementLayers(run) {
  const prefix = "routing/agreement_layer/";
  return Object.keys(run.metrics).filter((key) => key.startsWith(prefix)).map((key) => Number(key.slice(prefix.length))).sort((a, b) => a - b);
}

function drawAgreement() {
  const runs = RUNS.filter((run) => agreementLayers(run).length);
  if (!runs.length) {
    byId("agreement-note").textContent = "No run replayed routes, so there is nothing to compare.";
    return;
  }
  const lowest = Math.min(...runs.flatMap((run) => agreementLayers(run).flatMap((layer) => known(run.metrics[`routing/agreement_layer/${layer}`]))));
  const low = Math.min(0.95, Math.floor(lowest * 20) / 20);
  byId("agreement-note").textContent = "Share of tokens whose live top-k would have been the replayed set, by MoE layer. " +
    `All runs have the same scale, from ${low} to 1; the lowest value is ${short(lowest)}. Empty cells were not measured.`;
  for (const run of runs) {
    const layers = agreementLayers(run);
    const steps = run.metrics.step.map((_, i) => i).filter((i) => layers.some((layer) => run.metrics[`routing/agreement_layer/${layer}`][i] !== null));
    const plot = chartCard(byId("agreement"), run.name, `${layers.length} layers, ${steps.length} steps`);
    keepDrawn(() => Plotly.react(plot, [{
      type: "heatmap", x: steps.map((i) => run.metrics.step[i]), y: layers.map(String),
      z: layers.map((layer) => steps.map((i) => run.metrics[`routing/agreement_layer/${layer}`][i])),
      zmin: low, zmax: 1, colorscale: [[0, "#8c1d18"], [0.5, "#e79a7d"], [1, "#f4f4f2"]], xgap: steps.length < 60 ? 1 : 0, ygap: 1,
      hovertemplate: "step %{x}, layer %{y}: %{z:.4f}<extra></extra>",
      colorbar: { thickness: 10, outlinewidth: 0, tickfont: FONT, title: { text: "agreement", side: "right", font: FONT } },
    }], layout({ hovermode: "closest", yaxis: { type: "category", title: { text: "layer", font: FONT }, showgrid: false } }), PLOT_SETTINGS));
  }
}

/** Largest load of an expert by layer and step, from the metrics of every step. */
function drawLoadStrip() {
  const prefix = "routing/load_max_layer/";
  const layersOf = (run) => Object.keys(run.metrics).filter((key) => key.startsWith(prefix)).map((key) => Number(key.slice(prefix.length))).sort((a, b) => a - b);
  const runs = RUNS.filter((run) => layersOf(run).length);
  const most = Math.max(2, ...runs.flatMap((run) => layersOf(run).flatMap((layer) => known(run.metrics[prefix + layer]))));
  for (const run of runs) {
    const layers = layersOf(run);
    const steps = run.metrics.step.map((_, i) => i).filter((i) => layers.some((layer) => run.metrics[prefix + layer][i] !== null));
    const plot = chartCard(byId("load-strip"), `Largest load, ${run.name}`, "choices of the busiest expert / mean of the layer; 1 is an even load");
    keepDrawn(() => Plotly.react(plot, [{
      type: "heatmap", x: steps.map((i) => run.metrics.step[i]), y: layers.map(String),
      z: layers.map((layer) => steps.map((i) => run.metrics[prefix + layer][i])), zmin: 1, zmax: most,
      customdata: layers.map((layer) => steps.map((i) => (run.metrics[`routing/load_dead_layer/${layer}`] || [])[i] ?? "–")),
      colorscale: [[0, "#f4f4f2"], [0.5, "#e79a7d"], [1, "#8c1d18"]], xgap: steps.length < 60 ? 1 : 0, ygap: 1,
      hovertemplate: "step %{x}, layer %{y}: %{z:.2f} of the mean, %{customdata} experts without tokens<extra></extra>",
      colorbar: { thickness: 10, outlinewidth: 0, tickfont: FONT, title: { text: "max / mean", side: "right", font: FONT } },
    }], layout({ hovermode: "closest", yaxis: { type: "category", title: { text: "layer", font: FONT }, showgrid: false } }), PLOT_SETTINGS));
  }
}

function drawLoad() {
  const runs = RUNS.filter((run) => run.loads.length);
  const note = byId("load-note");
  if (!runs.length) {
    note.textContent = "No dump holds routes, so the load of the experts is not known.";
    return;
  }
  note.textContent = "Tokens per expert in the dumped rollouts, divided by the layer's mean: 1 is an even load, 0 an expert without tokens.";
  const steps = [...new Set(runs.flatMap((run) => run.loads.map((load) => load.step)))].sort((a, b) => a - b);
  const select = make("select", "", { id: "load-step" }, ...steps.map((step) => make("option", "", { value: step, textContent: step })));
  const inAll = steps.filter((step) => runs.every((run) => run.loads.some((load) => load.step === step)));
  select.value = (inAll.length ? inAll : steps).at(-1);
  byId("load-controls").append(make("label", "", {}, "Step ", select));
  const relative = (load) => load.tokens.map((row) => row.map((tokens) => tokens / (mean(row) || 1)));
  const most = Math.max(2, ...runs.flatMap((run) => run.loads.flatMap((load) => relative(load).flat())));
  const draws = runs.map((run) => {
    const plot = chartCard(byId("load"), run.name, "");
    const says = plot.previousSibling;
    return () => {
      const load = run.loads.find((each) => each.step === Number(select.value));
      says.textContent = load ? `${whole(load.tokens[0].reduce((a, b) => a + b))} choices per layer` : "no dump at this step";
      const traces = load ? [{
        type: "heatmap", x: load.tokens[0].map((_, i) => String(i)), y: load.layers.map(String), z: relative(load), customdata: load.tokens,
        zmin: 0, zmax: most, zmid: 1, colorscale: [[0, "#2f6db5"], [0.5, "#f7f7f5"], [1, "#b3392f"]], xgap: 1, ygap: 1,
        hovertemplate: "layer %{y}, expert %{x}: %{z:.2f} of the mean, %{customdata} choices<extra></extra>",
        colorbar: { thickness: 10, outlinewidth: 0, tickfont: FONT, title: { text: "load / mean", side: "right", font: FONT } },
      }] : [];
      Plotly.react(plot, traces, layout({ hovermode: "closest", xaxis: { type: "category", title: { text: "expert", font: FONT, standoff: 4 }, nticks: 20 },
        yaxis: { type: "category", title: { text: "layer", font: FONT }, showgrid: false } }), PLOT_SETTINGS);
    };
  });
  select.onchange = () => draws.forEach((draw) => draw());
  draws.forEach(keepDrawn);
}

function drawRouting() {
  const box = byId("routing-charts");
  lineChart(box, "Agreement", "over all layers", [["routing/agreement", "", "solid"]]);
  lineChart(box, "Coverage", "captured rows / expected rows", [["routing/coverage", "", "solid"]], SHARE);
  lineChart(box, "Router entropy", "of the gates over all experts, nats", [["routing/router_entropy", "", "solid"]], SHARE);
  lineChart(box, "Router gap", "weakest chosen score − best score left out", [["routing/router_gap", "", "solid"]], SHARE);
  lineChart(box, "Margin where they disagree", "weakest live score − weakest replayed score", [["routing/margin", "", "solid"]], SHARE);
  const loads = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].filter((key) => /load|balance|dead/.test(key) && !/layer\//.test(key));
  for (const key of loads.sort()) lineChart(box, key, DATA.glossary[key] || "", [[key, "", "solid"]]);
}

/** Largest value of a metric over all runs, for axes that several charts share. */
const highest = (key) => Math.max(0, ...RUNS.flatMap((run) => known(run.metrics[key])));

function drawTime() {
  const phases = Object.keys(PHASES).filter((phase) => phase === "rest" || RUNS.some((run) => known(run.metrics[`time/${phase}_s`]).length));
  for (const run of RUNS.filter((each) => known(each.metrics["time/step_s"]).length)) {
    const plot = chartCard(byId("time"), `Seconds per step, ${run.name}`, "slowest rank",
      phases.map((phase) => [phase, "solid", PHASES[phase]]));
    const seconds = (phase, i) => (run.metrics[`time/${phase}_s`] || [])[i] || 0;
    const rest = run.metrics.step.map((_, i) =>
      Math.max(0, seconds("step", i) - phases.filter((phase) => phase !== "rest").reduce((sum, phase) => sum + seconds(phase, i), 0)));
    const traces = phases.map((phase) => ({ type: "bar", name: phase, x: run.metrics.step, marker: { color: PHASES[phase] },
      y: phase === "rest" ? rest : run.metrics.step.map((_, i) => seconds(phase, i)), hovertemplate: "%{y:.3~g} s" }));
    keepDrawn(() => Plotly.react(plot, traces, layout({ barmode: "stack", bargap: 0.15,
      yaxis: { title: { text: "seconds", font: FONT }, range: [0, 1.05 * highest("time/step_s")] } }), PLOT_SETTINGS));
  }
}

function drawMemory() {
  const parts = Object.keys(MEMORY);
  for (const run of RUNS.filter((each) => parts.some((part) => known(each.metrics[`memory/${part}_gib`]).length))) {
    const plot = chartCard(byId("memory"), `Memory, ${run.name}`, "GiB in use per phase, fullest rank; residue: what stays while engine and policy are both put away",
      parts.map((part) => [part, "solid", MEMORY[part]]));
    const traces = parts.map((part) => ({ type: "scatter", mode: "lines", name: part, ...points(run, `memory/${part}_gib`),
      line: { color: MEMORY[part], width: 1.8 }, hovertemplate: "%{y:.3~f} GiB" }));
    keepDrawn(() => Plotly.react(plot, traces, layout({ yaxis: { title: { text: "GiB", font: FONT },
      range: [0, 1.08 * highest("memory/peak_gib")] } }), PLOT_SETTINGS));
  }
  lineChart(byId("cost-charts"), "Tokens per second", "prompts included", [["perf/tokens_per_s", "", "solid"]], SHARE);
  lineChart(byId("cost-charts"), "Packing efficiency", "tokens of rollouts / capacity of the micro-batches", [["perf/packing_efficiency", "", "solid"]], SHARE);
  lineChart(byId("cost-charts"), "Seconds until judged", "from a sample's end to its reward, mean", [["time/judge_mean_s", "", "solid"]], SHARE);
}

function drawExplorer() {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].filter((key) => key !== "step").sort();
  const select = byId("metric");
  select.append(...keys.map((key) => make("option", "", { value: key, textContent: key })));
  if (keys.includes("reward/std")) select.value = "reward/std";
  const draw = () => {
    byId("metric-formula").textContent = DATA.glossary[select.value] || "";
    const traces = RUNS.filter((run) => run.shown).map((run) => ({ ...points(run, select.value), type: "scatter", mode: "lines+markers", name: run.name,
      marker: { size: 4 }, line: { color: run.colour, width: 1.8 }, hovertemplate: "%{y:.5~g}" }));
    Plotly.react("metric-plot", traces, layout({ yaxis: byId("metric-log").checked ? logAxis(traces.flatMap((trace) => trace.y)) : {} }), PLOT_SETTINGS);
  };
  select.onchange = draw;
  byId("metric-log").onchange = draw;
  keepDrawn(draw);
}

function drawCharts() {
  drawLearning();
  drawMismatch();
  drawAgreement();
  drawLoadStrip();
  drawLoad();
  drawRouting();
  drawTime();
  drawMemory();
  drawExplorer();
}
