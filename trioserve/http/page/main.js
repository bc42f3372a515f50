// Looks at the server once a second while somebody can see it.

const EVERY_MS = 1000;

let history = new History();
let version = null;
let firstVersion = null; // of the server that this document came from
let silentSince = null;
let lastPhase = null;
let round = 0; // which loop of looks is the one that counts

function ask(message) {
  round += 1;
  clearAll();
  show($("app"), false);
  show($("sign-in"), true);
  show($("forget"), false);
  setText($("key-fault"), message);
  document.title = "trioserve";
  $("key").focus();
}

function enter() {
  show($("sign-in"), false);
  show($("app"), true);
  show($("forget"), link.key !== null);
}

// Nothing of the server may stay on the screen, or in the document, without the key.
function clearAll() {
  chat.running?.abort();
  startAnew();
  for (const id of ["prompt", "system"]) $(id).value = "";
  drawSettings();
  history = new History();
  version = null;
  silentSince = null;
  clearLines();
  for (const id of ["version", "model", "uptime", "restarts", "notice", "settled", "spoken"]) {
    setText($(id), "");
  }
  for (const node of document.querySelectorAll(".figure b")) setValue(node.id, NONE);
  for (const node of document.querySelectorAll(".figure .note[id]")) setText(node, "");
  setText($("waiting"), NONE);
  for (const id of ["stages", "stages-done"]) $(id).replaceChildren();
  drawPhase("unknown", "");
  show($("live"), false);
  show($("starting"), false);
}

function onRefused(error) {
  link.remember(null);
  ask(error.message);
}

async function look() {
  const at = performance.now() / 1000;
  const [startup, text] = await Promise.all([link.get("startup", "json"), link.get("metrics", "text")]);
  if (typeof startup.phase !== "string" || !Array.isArray(startup.stages)) throw new SyntaxError();
  if (version === null || startup.uptime_s < (history.now?.startup.uptime_s ?? 0)) {
    version = (await link.get("version", "json")).version;
  }
  const series = new Series(text);
  startup.paused = series.total("engine_paused") > 0;
  return { at, startup, series };
}

// One look, drawn unless a key was asked for meanwhile.
async function lookOnce(mine) {
  let seen;
  try {
    seen = await look();
  } catch (error) {
    if (mine !== round) return;
    if (error instanceof Refused && error.status === 401) onRefused(error);
    else drawSilence(error);
    return;
  }
  if (mine !== round) return;
  try {
    draw(seen);
  } catch (error) {
    console.error(error);
    drawPhase("offline", "The server's answers are not understood. Reload the page.");
  }
  drawComposer();
}

function draw(seen) {
  silentSince = null;
  lastPhase = seen.startup.phase;
  history.add(seen);
  if (history.looks.length === 1) clearLines();
  firstVersion ??= version;
  setText($("version"), version === firstVersion ? version : `${version} · reload for its page`);
  drawStartup(seen.startup);
  drawReading(makeReading(history), seen.startup.info);
}

function drawSilence(error) {
  silentSince ??= new Date();
  const since = silentSince.toLocaleTimeString([], { hour12: false });
  const before = { draining: " It was shutting down.", failed: " Its engine had ended." }[lastPhase] ?? "";
  const stranger = error instanceof Refused || error instanceof SyntaxError;
  const what = stranger
    ? `What answers at ${location.host} is not a trioserve server`
    : `${location.host} has not answered`;
  drawPhase("offline", `${what} since ${since}.${before} Trying again every second.`);
  document.title = `${$("model").textContent.trim() || "trioserve"} · ${PHASES.offline}`;
  drawComposer();
}

function untilVisible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
  });
}

async function keepLooking() {
  const mine = ++round;
  enter();
  while (mine === round) {
    while (document.hidden) await untilVisible();
    const began = performance.now();
    await lookOnce(mine);
    const pause = Math.max(0, EVERY_MS - (performance.now() - began));
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

async function signIn() {
  const key = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    setText($("key-fault"), key ? "A key has letters, digits and signs of ASCII only." : "Enter a key.");
    return;
  }
  link.key = key;
  try {
    await link.get("startup", "json");
  } catch (error) {
    link.key = null;
    setText($("key-fault"), error instanceof Refused ? error.message : "The server does not answer.");
    return;
  }
  link.remember(key);
  $("key").value = "";
  setText($("key-fault"), "");
  keepLooking();
}

function drawAddress() {
  const address = new URL("v1", document.baseURI).href;
  setText($("address"), address);
  if (!navigator.clipboard) return; // only there over TLS or on this machine
  show($("copy"), true);
  $("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(address).then(
      () => setText($("copy"), "Copied"),
      () => setText($("copy"), "Not allowed"),
    );
    setTimeout(() => setText($("copy"), "Copy"), 2000);
  });
}

drawAddress();
setUpChat(onRefused);
$("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn();
});
$("forget").addEventListener("click", () => {
  link.remember(null);
  ask("");
});
link.recall();
if (document.documentElement.hasAttribute("data-locked") && link.key === null) ask("");
else keepLooking();
