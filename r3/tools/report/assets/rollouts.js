// The browser of rollouts: a filtered, sorted list; one sample as conversation, as coloured tokens, or against another one.

const ORDERS = {
  "dump order": () => 0,
  "reward, highest first": (a, b) => b.reward - a.reward,
  "reward, lowest first": (a, b) => a.reward - b.reward,
  "advantage, highest first": (a, b) => (b.advantage || 0) - (a.advantage || 0),
  "longest first": (a, b) => b.length - a.length,
  "shortest first": (a, b) => a.length - b.length,
};

// How a value becomes a colour: from white at 0, to a blue for positive and a red for negative values at the end of the scale.
const mix = (share, [r, g, b]) => `rgb(${[r, g, b].map((part) => Math.round(255 + (part - 255) * share)).join(",")})`;
const BLUE = [92, 150, 214], RED = [222, 110, 92], AMBER = [232, 176, 70], VIOLET = [150, 110, 190];
const twoSided = (value, end) => mix(Math.min(1, Math.abs(value) / end), value < 0 ? RED : BLUE);

const state = { run: 0, dump: 0, text: "", reward: "", finish: "", group: null, order: "dump order", chosen: null, view: "conversation",
  colour: "advantage", other: null };

const dumpOf = () => RUNS[state.run].dumps[state.dump];
const dumpLabel = (dump) => (dump.kind === "train" ? `step ${dump.step}, training` : `step ${dump.step}, ${dump.name} (evaluation)`);

/** All text of a sample, for the search. */
const textOf = (sample) => [sample.prompt, sample.question, sample.reference, ...sample.messages.map((each) => each.content)].join("\n").toLowerCase();
/** The last thing the model wrote. */
const response = (sample) => (sample.messages.filter((each) => each.role === "assistant").pop() || { content: "" }).content || "";

function drawBrowser() {
  const first = RUNS.findIndex((run) => run.dumps.length);
  if (first < 0) {
    byId("rollouts-note").textContent = "No run has dumps. Set --log.rollouts_every to write the rollouts of some steps.";
    byId("browser").remove();
    return;
  }
  state.run = first;
  chooseNewest();
  // A sample that teaches something says more at first sight than one of a group with equal rewards.
  state.chosen = dumpOf().samples.find((sample) => sample.advantage) || dumpOf().samples[0];
  byId("rows").onkeydown = (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const samples = visible();
    choose(samples[Math.max(0, Math.min(samples.length - 1, samples.indexOf(state.chosen) + move))]);
    document.querySelector(".row.chosen").scrollIntoView({ block: "nearest" });
  };
  refresh();
}

/** The newest dump of training, or else of evaluation. */
function chooseNewest() {
  const dumps = RUNS[state.run].dumps;
  const trained = dumps.filter((dump) => dump.kind === "train");
  state.dump = dumps.indexOf(trained.length ? trained[trained.length - 1] : dumps[dumps.length - 1]);
}

/** Samples that pass the filters, in the chosen order. */
function visible() {
  const dump = dumpOf();
  const kept = dump.samples.filter((sample) =>
    (!state.text || textOf(sample).includes(state.text.toLowerCase())) &&
    (!state.finish || sample.finish === state.finish) &&
    (state.group === null || sample.group === state.group) &&
    (!state.reward || (state.reward === "above" ? sample.reward > dump.mean : sample.reward <= dump.mean)));
  return kept.map((sample, i) => [sample, i]).sort(([a, i], [b, j]) => ORDERS[state.order](a, b) || i - j).map(([sample]) => sample);
}

function choose(sample) {
  if (!state.chosen || !sample || state.chosen.group !== sample.group) state.other = null;
  state.chosen = sample;
  drawRows();
  drawDetail();
}

function refresh() {
  drawFilters();
  const samples = visible();
  if (!samples.includes(state.chosen)) choose(samples[0]);
  else choose(state.chosen);
}

/** A <select> under a label; `options` are [value, text]. */
function picker(label, id, options, value, onPick) {
  const select = make("select", "", { id }, ...options.map(([key, text]) => make("option", "", { value: key, textContent: text })));
  select.value = value;
  select.onchange = () => { onPick(select.value); state.chosen = null; refresh(); };
  return make("label", "", {}, label, " ", select);
}

function drawFilters() {
  const box = byId("filters");
  const dumps = RUNS[state.run].dumps;
  const finishes = [...new Set(dumpOf().samples.map((sample) => sample.finish))].sort();
  const search = make("input", "", { type: "search", id: "search", placeholder: "search text", value: state.text });
  search.oninput = () => { state.text = search.value; choose(visible()[0]); };
  const parts = [
    RUNS.length > 1 ? picker("Run", "run", RUNS.map((run, i) => [i, run.name]).filter(([i]) => RUNS[i].dumps.length), state.run,
      (value) => { state.run = Number(value); state.group = null; chooseNewest(); }) : null,
    picker("Dump", "dump", dumps.map((dump, i) => [i, dumpLabel(dump)]), state.dump, (value) => { state.dump = Number(value); state.group = null; }),
    picker("Reward", "reward", [["", "any"], ["above", "above the mean"], ["below", "mean or less"]], state.reward, (value) => { state.reward = value; }),
    finishes.length > 1 ? picker("Finish", "finish", [["", "any"], ...finishes.map((name) => [name, name])], state.finish, (value) => { state.finish = value; }) : null,
    picker("Sort", "order", Object.keys(ORDERS).map((name) => [name, name]), state.order, (value) => { state.order = value; }),
    search,
  ];
  if (!finishes.includes(state.finish)) state.finish = "";
  box.replaceChildren(...parts.filter(Boolean));
  const dump = dumpOf();
  byId("rollouts-note").textContent = dump.samples.length < dump.total
    ? `This page holds ${dump.samples.length} of the dump's ${dump.total} samples: whole groups, evenly spaced. --samples sets how many.`
    : `All ${dump.total} samples of the dump.`;
}

function drawRows() {
  const samples = visible();
  const count = make("span", "", {}, `${samples.length} samples`);
  const rewards = samples.filter((sample) => !sample.uncounted).map((sample) => sample.reward);
  if (rewards.length) count.append(`, mean reward ${short(mean(rewards))}`);
  const all = make("button", "plain", { type: "button", id: "all-prompts" }, `only prompt ${state.group} ×`);
  all.onclick = () => { state.group = null; refresh(); };
  byId("count").replaceChildren(count, ...(state.group === null ? [] : ["  ", all]));
  byId("rows").replaceChildren(...samples.map((sample) => {
    const row = make("div", sample === state.chosen ? "row chosen" : "row", {},
      make("div", "", {}, make("div", `reward ${sample.reward > dumpOf().mean ? "ok" : ""}`, {}, short(sample.reward)),
        make("div", "sub", {}, sample.advantage === undefined ? "" : `A ${sample.advantage.toFixed(2)}`)),
      make("div", "", { style: "min-width:0" }, make("div", "text", {}, response(sample).trim().replace(/\s*\n\s*/g, " · ") || "(empty)"),
        make("div", "sub", {}, `${sample.prompt}, sample ${sample.sample}`)),
      make("div", "side", {}, `${sample.length} tok`, make("div", "", {}, sample.finish)));
    row.onclick = () => choose(sample);
    return row;
  }));
}

function drawDetail() {
  const box = byId("detail");
  const sample = state.chosen;
  if (!sample) {
    box.replaceChildren(make("p", "lead", {}, "No sample passes the filters."));
    return;
  }
  const fact = (label, value) => make("div", "", {}, make("b", "", {}, label), value);
  const facts = [fact("reward", short(sample.reward))];
  for (const [name, part] of Object.entries({ ...sample.components, ...sample.metrics })) facts.push(fact(name, short(part)));
  if (sample.turns) facts.push(fact("reward per turn", sample.turns.map((each) => (each === null ? "–" : short(each))).join(", ")));
  if (sample.advantage !== undefined) facts.push(fact("advantage", sample.advantage.toFixed(3)));
  facts.push(fact("sampled tokens", String(sample.length)), fact("finish reason", sample.finish), fact("sample", `${sample.sample} of prompt ${sample.group}`));
  const tabs = [["conversation", "Conversation"], ["tokens", "Tokens"], ["compare", "Compare within the group"]].map(([view, text]) => {
    const button = make("button", "plain", { type: "button", id: `view-${view}`, ariaPressed: String(state.view === view) }, text);
    button.onclick = () => { state.view = view; drawDetail(); };
    return button;
  });
  if (state.group === null) {
    const only = make("button", "plain", { type: "button", id: "only-prompt" }, "List this prompt's samples");
    only.onclick = () => { state.group = sample.group; refresh(); };
    tabs.push(only);
  }
  const view = { conversation: conversationView, tokens: tokensView, compare: compareView }[state.view];
  box.replaceChildren(make("div", "sub mono", {}, sample.prompt), make("div", "facts", {}, ...facts), make("div", "tabs", {}, ...tabs), ...view(sample));
}

function conversationView(sample) {
  let turn = 0;
  const parts = sample.messages.map((message) => {
    const role = [make("span", "", {}, message.role)];
    if (message.role === "assistant" && sample.turns && turn < sample.turns.length) {
      const reward = sample.turns[turn++];
      if (reward !== null) role.push(make("span", "", {}, `reward ${short(reward)}`));
    }
    const calls = (message.tool_calls || []).map((call) => {
      const asked = call.function || call;
      return make("pre", "call", {}, `${asked.name}(${typeof asked.arguments === "string" ? asked.arguments : JSON.stringify(asked.arguments)})`);
    });
    return make("div", `message ${message.role}`, {}, make("div", "role", {}, ...role), ...(message.content ? [make("pre", "", {}, message.content)] : []), ...calls);
  });
  if (sample.reference) parts.push(make("div", "message reference", {}, make("div", "role", {}, "reference answer"), make("pre", "", {}, sample.reference)));
  return parts;
}

/** The 99th percentile of sizes: one odd token would make all others white. */
function largeSize(values) {
  const sizes = known(values).map(Math.abs).sort((a, b) => a - b);
  return sizes[Math.ceil(sizes.length * 0.99) - 1] || 1e-9;
}

// What tokens can be coloured by: name, whether the dump has it, the values of the sampled tokens, the scale (open: some
// values are beyond its ends; floor: below its lower end).
const COLOURINGS = {
  advantage: { text: "advantage", has: (sample) => sample.advantage !== undefined, values: (sample) => sample.tokens.logprobs.map(() => sample.advantage),
    end: (dump) => Math.max(1e-9, ...dump.samples.map((each) => Math.abs(each.advantage || 0))), colour: twoSided, sides: 2 },
  logprob: { text: "log-probability when sampled", has: () => true, values: (sample) => sample.tokens.logprobs, end: () => -5,
    colour: (value, end) => mix(Math.min(1, value / end), AMBER), sides: 1, floor: true },
  difference: { text: "log-probability: policy − engine", has: (_, dump) => dump.has_differences, values: (sample) => sample.tokens.differences,
    end: (dump) => largeSize(dump.samples.flatMap((each) => (each.tokens && each.tokens.differences) || [])), colour: twoSided, sides: 2, open: true },
  disagreement: { text: "routing disagreement", has: (_, dump) => dump.has_disagreement, values: (sample) => sample.tokens.disagreement, end: () => 1,
    colour: (value, end) => mix(Math.min(1, value / end), VIOLET), sides: 1 },
};

function tokensView(sample) {
  const run = RUNS[state.run], dump = dumpOf();
  if (!sample.tokens) {
    return [make("p", "note", {}, dump.kind === "eval" ? "Evaluation dumps hold text, not tokens."
      : "This page holds the tokens of the first samples only; --tokens sets how many.")];
  }
  if (!COLOURINGS[state.colour].has(sample, dump)) state.colour = "logprob";
  const select = make("select", "", { id: "colour" }, ...Object.entries(COLOURINGS).map(([key, { text, has }]) =>
    make("option", "", { value: key, disabled: !has(sample, dump), textContent: has(sample, dump) ? text : `${text} (not in this dump)` })));
  select.value = state.colour;
  select.onchange = () => { state.colour = select.value; drawDetail(); };
  const { values, end, colour, sides, text, open, floor } = COLOURINGS[state.colour];
  const limit = end(dump), numbers = values(sample);
  const bar = make("i");
  bar.style.background = sides === 2 ? `linear-gradient(90deg, ${colour(-limit, limit)}, #fff, ${colour(limit, limit)})` : `linear-gradient(90deg, #fff, ${colour(limit, limit)})`;
  const scale = make("div", "scale", {}, (open ? "≤ " : "") + short(sides === 2 ? -limit : 0, 2), bar,
    (open ? "≥ " : floor ? "≤ " : "") + short(limit, 2));
  const missing = dump.has_differences ? [] : [make("p", "note", {},
    `Differences from the policy and routing disagreement are not in this dump. python -m r3.rescore ${run.path} --step ${dump.step} --save adds them.`)];

  const line = make("div", "tokens");
  let next = 0;
  sample.tokens.ids.forEach((id, place) => {
    const word = run.vocabulary[id] === undefined ? ` ${id} ` : run.vocabulary[id];
    const sampled = sample.tokens.sampled.some(([from, to]) => place >= from && place < to);
    const span = make("span", sampled ? "s" : "p", {}, word === "\n" ? "↵\n" : word);
    if (sampled) {
      const value = numbers[next], logprob = sample.tokens.logprobs[next++];
      if (value !== null) span.style.background = colour(value, limit);
      span.title = `token ${place}, id ${id}\nlog-probability ${logprob}` + (state.colour === "logprob" ? "" : `\n${text} ${value === null ? "unknown" : value}`);
    } else {
      span.title = `token ${place}, id ${id}, not sampled`;
    }
    line.append(span);
  });
  return [make("div", "controls", {}, make("label", "", {}, "Colour by ", select)), scale, ...missing, line];
}

/** Words, numbers, runs of blanks and single signs. */
const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];

/** The difference of two lists as [kind, word] with kind "same", "del" or "ins", by their longest common subsequence. */
function difference(a, b) {
  if (a.length * b.length > 4e6) return [...a.map((word) => ["del", word]), ...b.map((word) => ["ins", word])];
  const size = Array.from({ length: a.length + 1 }, () => new Uint32Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) size[i][j] = a[i] === b[j] ? size[i + 1][j + 1] + 1 : Math.max(size[i + 1][j], size[i][j + 1]);
  }
  const result = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { result.push(["same", a[i]]); i++; j++; }
    else if (j === b.length || (i < a.length && size[i + 1][j] >= size[i][j + 1])) result.push(["del", a[i++]]);
    else result.push(["ins", b[j++]]);
  }
  return result;
}

function compareView(sample) {
  const others = dumpOf().samples.filter((each) => each.group === sample.group && each !== sample);
  if (!others.length) return [make("p", "note", {}, "The prompt has one sample in this dump.")];
  // The most useful other one at first: that whose reward is farthest from this one's.
  if (!others.includes(state.other)) state.other = [...others].sort((a, b) => Math.abs(b.reward - sample.reward) - Math.abs(a.reward - sample.reward))[0];
  const select = make("select", "", { id: "other" }, ...others.map((each, i) => make("option", "", { value: i, textContent: `sample ${each.sample}, reward ${short(each.reward)}` })));
  select.value = others.indexOf(state.other);
  select.onchange = () => { state.other = others[Number(select.value)]; drawDetail(); };
  const text = (each) => each.messages.filter((message, i) => i > 0 || message.role === "assistant")
    .filter((message) => ["assistant", "tool"].includes(message.role)).map((message) => message.content || "").join("\n");
  const parts = difference(words(text(sample)), words(text(state.other)));
  const side = (kind) => make("pre", "", {}, ...parts.filter(([each]) => each === "same" || each === kind).map(([each, word]) => make(each === "same" ? "span" : kind, "", {}, word)));
  const head = (each) => make("div", "note", {}, `sample ${each.sample}, reward ${short(each.reward)}, ${each.length} tokens`);
  return [make("div", "controls", {}, make("label", "", {}, "Compare with ", select)),
    make("div", "pair", {}, make("div", "", {}, head(sample), side("del")), make("div", "", {}, head(state.other), side("ins")))];
}
