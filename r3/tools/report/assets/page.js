// Reads the page's data and draws what is not a chart: run chips, overview, settings, ledger.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const COLOURS = ["#2f6db5", "#d2622a", "#2f8f5b", "#8a56ac", "#b58a00", "#4a7d8c", "#c0417c", "#6b6f76"];
RUNS.forEach((run, i) => { run.colour = COLOURS[i % COLOURS.length]; run.shown = true; });

const byId = (id) => document.getElementById(id);

/** An element with a class, properties and children; strings become text, never markup. */
function make(tag, className = "", properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** The run's name behind a dot in its colour. */
function runName(run) {
  const dot = make("span", "dot");
  dot.style.background = run.colour;
  return make("span", "", {}, dot, " ", run.name);
}

/** A number with about three digits; small and large ones with an exponent. */
function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1);
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(digits)));
}

const whole = (value) => value.toLocaleString("en-US");
const known = (values) => (values || []).filter((value) => value !== null);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** First and last known value of a metric as "0.43 → 0.83". */
function change(run, key) {
  const values = known(run.metrics[key]);
  if (!values.length) return "–";
  return values.length === 1 ? short(values[0]) : `${short(values[0])} → ${short(values[values.length - 1])}`;
}

/** The median of a metric over the steps. */
function median(run, key) {
  const values = known(run.metrics[key]).sort((a, b) => a - b);
  return values.length ? values[Math.floor((values.length - 1) / 2)] : null;
}

/** A table in a card; cells are nodes or text, numbers in columns named in `right`. */
function table(heads, rows, right = []) {
  const cell = (tag, content, i) => make(tag, right.includes(i) ? "number" : "", {}, content);
  return make("table", "", {},
    make("thead", "", {}, make("tr", "", {}, ...heads.map((head, i) => cell("th", head, i)))),
    make("tbody", "", {}, ...rows.map((row) => make("tr", "", {}, ...row.map((content, i) => cell("td", content, i))))));
}

const evalKeys = (figure = "accuracy") => [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))]
  .filter((key) => key.startsWith("eval/") && key.endsWith(`/${figure}`) && key.split("/").length === 3).sort();

function drawOverview() {
  byId("title").textContent = RUNS.map((run) => run.name).join(" and ");
  byId("made").textContent = `Made ${DATA.made} by R3 ${DATA.version}.`;
  for (const run of RUNS) {
    for (const note of run.notes) byId("notes").append(make("div", "warning", {}, `${run.name}: ${note}`));
  }
  const evals = [...evalKeys(), ...evalKeys("reward")];
  const heads = ["Run", "Steps", "Reward", ...evals.map((key) => key.split("/").slice(1).join(" ")), "Response tokens",
    "Entropy", "k3, median", "Agreement", "Seconds per step"];
  const rows = RUNS.map((run) => {
    const steps = known(run.metrics.step);
    return [runName(run), steps.length ? String(steps[steps.length - 1]) : "0", change(run, "reward/mean"),
      ...evals.map((key) => change(run, key)), change(run, "rollout/response_tokens_mean"), change(run, "policy/entropy"),
      short(median(run, "mismatch/k3"), 2), short(median(run, "routing/agreement")), short(median(run, "time/step_s"))];
  });
  byId("summary").replaceWith(table(heads, rows, heads.map((_, i) => i).slice(1)));
  byId("footer").textContent = `This page is one file: it needs no network. Folders: ${RUNS.map((run) => run.path).join(", ")}.`;
}

/** A table of settings, one column per run. */
function settingsTable(names) {
  const code = (text) => make("code", "", {}, text === undefined ? "–" : text === "" ? "''" : text);
  return make("div", "card table", {},
    table(["Setting", ...RUNS.map(runName)], names.map((name) => [code(name), ...RUNS.map((run) => code(run.settings[name]))])));
}

function drawSettings() {
  const box = byId("settings");
  const all = [...new Set(RUNS.flatMap((run) => Object.keys(run.settings)))];
  const changed = all.filter((name) => RUNS.some((run) => run.changed.includes(name)));
  if (RUNS.length > 1) {
    box.append(make("h3", "", {}, "Settings that differ"));
    box.append(DATA.differing.length ? settingsTable(DATA.differing) : make("p", "lead", {}, "None: the runs have equal settings."));
  }
  const bases = [...new Set(RUNS.map((run) => run.base || "the defaults"))];
  for (const [title, names, open] of [
    [`Settings that differ from ${bases.join(" and ")} (${changed.length})`, changed, RUNS.length === 1 && changed.length > 0],
    [`All settings (${all.length})`, all, false],
  ]) {
    box.append(make("details", "", { open }, make("summary", "", {}, title), settingsTable(names)));
  }
}

/** The sum of a ledger's column over the steps, null when the run does not report it. */
function total(run, name) {
  const values = known(run.metrics[`routing/rows_${name}`]);
  return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
}

function drawLedger() {
  const box = byId("ledger");
  box.append(make("h3", "", {}, "Route ledger, all steps"));
  const runs = RUNS.filter((run) => total(run, "captured") !== null);
  if (!runs.length) {
    box.append(make("p", "lead", {}, "No run captured routes (replay.mode is not r3, or the model is dense)."));
    return;
  }
  box.append(make("p", "lead", {}, "A row is one token's experts in all layers. Rows that the engine captured must be replayed, " +
    "and rows routed live must have a cause, once in each epoch of a step. Both sides are counted independently."));
  const columns = [["expected", "expected"], ["captured", "captured"], ["replayed", "replayed"], ["missing", "missing"],
    ["missing, whole rollout", "missing_rollout"], ["last tokens", "last_token"], ["routed live", "live"]];
  const rows = runs.map((run) => {
    const live = ["last_token", "missing", "missing_rollout"].map((name) => total(run, name) || 0).reduce((a, b) => a + b);
    const epochs = Number(run.settings["train.epochs_per_step"]) || 1; // each replays every row once
    const balanced = epochs * total(run, "captured") === total(run, "replayed") && epochs * live === total(run, "live");
    const verdict = balanced ? make("span", "ok", {}, "balanced") : make("span", "broken", {}, "not balanced");
    return [runName(run), ...columns.map(([, name]) => (total(run, name) === null ? "–" : whole(total(run, name)))), verdict];
  });
  box.append(make("div", "card table", {}, table(["Run", ...columns.map(([label]) => label), "Ledger"], rows, [1, 2, 3, 4, 5, 6, 7])));
  const without = RUNS.filter((run) => !runs.includes(run)).map((run) => run.name);
  if (without.length) box.append(make("p", "note", {}, `Without captured routes: ${without.join(", ")}.`));
}

function drawChips() {
  for (const run of RUNS) {
    const chip = make("button", "chip", { type: "button", title: "Show or hide this run in the charts" }, ...runName(run).childNodes);
    chip.onclick = () => {
      run.shown = !run.shown;
      chip.classList.toggle("off", !run.shown);
      redrawCharts();
    };
    byId("chips").append(chip);
  }
}

window.addEventListener("DOMContentLoaded", () => {
  drawChips();
  drawOverview();
  drawSettings();
  drawLedger();
  drawCharts();
  drawBrowser();
});
