// What the server is and does, drawn anew at each look.

const PHASES = {
  loading: "Loading",
  ready: "Ready",
  restarting: "Restarting",
  draining: "Shutting down",
  paused: "Paused",
  failed: "Failed",
  closed: "Closed",
  offline: "No answer",
};
const SAMPLES = 60;

const lines = { output: [], prompts: [] };

function phaseOf(startup) {
  return startup.phase === "ready" && startup.paused ? "paused" : startup.phase;
}

function drawPhase(phase, notice) {
  $("app").dataset.phase = phase;
  setText($("phase"), PHASES[phase] ?? phase);
  setText($("notice"), notice);
}

function noticeOf(phase, { cause }) {
  const because = cause ? `: ${cause}` : ".";
  switch (phase) {
    case "restarting":
      return `The worker ended and another is being started${because}`;
    case "draining":
      return "Running requests are being finished; new ones are refused.";
    case "paused":
      return "Requests are taken and wait; nothing is computed until it is resumed.";
    case "failed":
      return cause ? `The engine has ended: ${cause}` : "The engine has ended.";
    case "closed":
      return "The engine is closed.";
    default:
      return cause ?? "";
  }
}

function drawStartup(startup) {
  const phase = phaseOf(startup);
  drawPhase(phase, noticeOf(phase, startup));
  document.title = `${startup.model} · ${PHASES[phase] ?? phase}`;
  setText($("model"), startup.model);
  setText($("uptime"), `up ${formatDuration(startup.uptime_s)}`);
  const live = ["ready", "paused"].includes(phase) || (phase === "draining" && startup.info !== null);
  show($("live"), live);
  show($("starting"), !live);
  drawStages($(live ? "stages-done" : "stages"), startup.stages);
  const ready = startup.ready_after_s;
  setText($("started-in"), ready === null ? "" : `ready after ${formatSeconds(ready)}`);
  setText($("settled"), startup.info ? settledOn(startup.info) : "");
}

function settledOn(info) {
  return [
    info.architecture,
    `${formatParameters(info.num_parameters)} parameters`,
    `${info.weights} weights`,
    `computed as ${info.dtype}`,
    `${info.device}, ${info.threads} threads`,
    `${info.attention} attention`,
    `context of ${formatCount(info.max_model_len)} tokens`,
  ].join(" · ");
}

function drawStages(list, stages) {
  while (list.children.length > stages.length) list.lastElementChild.remove();
  stages.forEach((stage, i) => {
    const item = list.children[i] ?? list.appendChild(makeStage());
    const running = stage.state === "running";
    const parts = {};
    for (const part of item.children) parts[part.classList[0]] = part;
    if (item.dataset.state !== stage.state) item.dataset.state = stage.state;
    setText(parts.name, stage.name);
    setText(parts.state, `, ${stage.state}`);
    const share = running && stage.fraction !== null ? formatShare(stage.fraction) : "";
    const size = stage.bytes ? formatBytes(stage.bytes) : "";
    const took = stage.seconds === null ? "" : formatStage(stage.seconds, running);
    setText(parts.took, [share, size, took].filter(Boolean).join(" · "));
    setText(parts.detail, stage.detail);
    show(parts.detail, stage.detail !== "");
    show(parts.bar, running);
    if (running) drawProgress(parts.bar, stage);
  });
}

function formatStage(seconds, running) {
  return running ? `${Math.floor(seconds)} s` : seconds < 0.005 ? "0 s" : `${seconds.toFixed(2)} s`;
}

function drawProgress(bar, stage) {
  setBar(bar, stage.fraction);
  bar.setAttribute("aria-label", stage.name);
  if (stage.fraction === null) bar.removeAttribute("aria-valuenow");
  else bar.setAttribute("aria-valuenow", String(Math.round(stage.fraction * 100)));
}

function makeStage() {
  const bar = make("span", "bar", make("i"));
  bar.setAttribute("role", "progressbar");
  const mark = make("span", "mark");
  mark.setAttribute("aria-hidden", "true");
  const name = make("span", "name");
  const state = make("span", "state visually-hidden");
  return make("li", "", mark, name, state, make("span", "took"), bar, make("span", "detail"));
}

// A figure, paler where there is nothing to tell it from.
function setValue(id, text) {
  setText($(id), text);
  $(id).classList.toggle("none", text === NONE);
}

function drawReading(reading, info) {
  setValue("output", formatRate(reading.output));
  setValue("prompts", formatRate(reading.prompts));
  drawLine("output", reading.outputNow);
  drawLine("prompts", reading.promptsNow);
  setValue("running", formatCount(reading.running));
  setText($("waiting"), formatCount(reading.waiting));
  setValue("complete", formatCount(reading.complete));
  setText($("incomplete"), `${formatCount(reading.failed)} failed, ${formatCount(reading.left)} abandoned`);
  setValue("cache", formatShare(reading.cache));
  setBar($("cache-bar"), reading.cache);
  setText($("cache-size"), `of ${formatCount(reading.cacheTokens)} tokens`);
  setValue("hits", formatShare(reading.hits));
  setBar($("hits-bar"), reading.hits ?? 0);
  setText($("preemptions"), `${formatCount(reading.preemptions)} preemptions`);
  for (const name of ["first", "next", "whole"]) {
    const { median, tail } = reading[name];
    setValue(name, formatSeconds(median));
    setText($(`${name}-tail`), median === null ? "no requests" : `99 % below ${formatSeconds(tail)}`);
  }
  setValue("memory", reading.memory > 0 ? formatBytes(reading.memory) : NONE);
  const shares = info && `weights ${formatBytes(info.weight_bytes)}, cache at most ${formatBytes(info.kv_cache_bytes)}`;
  setText($("memory-shares"), shares ?? "");
  show($("restarts"), reading.restarts > 0);
  const times = reading.restarts === 1 ? "once" : `${formatCount(reading.restarts)} times`;
  setText($("restarts"), `worker restarted ${times}`);
}

// The last minute of a rate as a line, each point a look.
function drawLine(name, value) {
  const samples = lines[name];
  samples.push(value ?? 0);
  if (samples.length > SAMPLES) samples.shift();
  const most = Math.max(...samples, 1);
  const x = (i) => 120 - ((samples.length - 1 - i) * 120) / (SAMPLES - 1);
  const points = samples.map((sample, i) => `${x(i).toFixed(1)} ${(31 - (sample / most) * 30).toFixed(1)}`);
  const [area, edge] = $(`${name}-line`).children;
  edge.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M${x(0).toFixed(1)} 32L${points.join("L")}L120 32Z`);
}

function clearLines() {
  for (const samples of Object.values(lines)) samples.length = 0;
}
