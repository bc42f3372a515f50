// The playground: one conversation, one answer at a time.

const chat = {
  turns: [], // {role, text, state}: what is sent again with the next message
  running: null, // the AbortController of the answer under way
};

function setUpChat(onRefused) {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    sendPrompt(onRefused);
  });
  $("prompt").addEventListener("keydown", (event) => {
    // On a touch screen Enter is the only way to a new line.
    const touch = matchMedia("(pointer: coarse)").matches;
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("prompt").addEventListener("input", () => {
    fitPrompt();
    drawComposer();
  });
  $("stop").addEventListener("click", () => chat.running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") chat.running?.abort();
  });
  $("anew").addEventListener("click", startAnew);
  for (const id of ["temperature", "max-tokens", "system"]) {
    $(id).addEventListener("input", drawSettings);
  }
  drawSettings();
  drawComposer();
}

function fitPrompt() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function drawSettings() {
  const temperature = Number($("temperature").value).toFixed(1);
  const most = $("max-tokens").value.trim();
  setText($("temperature-now"), temperature);
  const system = $("system").value.trim() ? ", a system message" : "";
  setText($("settings-now"), `temperature ${temperature}, ${most ? `max ${most} tokens` : "as many tokens as fit"}${system}`);
}

function drawComposer() {
  const phase = $("app").dataset.phase;
  const able = ["ready", "paused"].includes(phase);
  const running = chat.running !== null;
  show($("send"), !running);
  show($("stop"), running);
  $("send").disabled = !able || $("prompt").value.trim() === "";
  show($("anew"), chat.turns.length > 0 && !running);
  show($("empty"), chat.turns.length === 0);
  const offline = phase === "offline" ? "The server does not answer." : "The model is not ready.";
  setText($("hint"), able || phase === "unknown" ? "" : offline);
}

function startAnew() {
  chat.turns = [];
  $("turns").replaceChildren();
  drawComposer();
  $("prompt").focus();
}

function sendPrompt(onRefused) {
  const text = $("prompt").value;
  if (chat.running !== null || $("send").disabled || text.trim() === "") return;
  $("prompt").value = "";
  fitPrompt();
  const turn = { role: "user", text };
  chat.turns.push(turn);
  $("turns").append(make("li", "turn user", spoken("You: "), make("div", "text", text)));
  answer(onRefused);
}

function spoken(text) {
  return make("span", "visually-hidden", text);
}

// What is sent: the conversation without answers that never began, and without their questions.
function messagesOf(turns) {
  const messages = [];
  const system = $("system").value.trim();
  if (system) messages.push({ role: "system", content: system });
  turns.forEach((turn, i) => {
    const next = turns[i + 1];
    if (turn.role === "user" && next && next.text === "") return;
    if (turn.role === "user" || turn.text !== "") {
      messages.push({ role: turn.role, content: turn.text });
    }
  });
  return messages;
}

function makeRequest(turns) {
  const most = $("max-tokens").value.trim();
  const body = {
    messages: messagesOf(turns),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: Number($("temperature").value),
  };
  // What is no number goes out as it stands: the server says what is wrong with it.
  if (most) body.max_tokens = /^-?\d+(\.\d+)?$/.test(most) ? Number(most) : most;
  return body;
}

// Asks for the next answer and shows it as it comes.
async function answer(onRefused) {
  const controller = new AbortController();
  const body = makeRequest(chat.turns);
  const turn = { role: "assistant", text: "" };
  chat.turns.push(turn);
  const view = makeAnswer();
  const watch = new Stopwatch();
  chat.running = controller;
  drawComposer();
  scrollDown(true);
  let outcome;
  try {
    outcome = await readAnswer(body, controller.signal, (chunk) => {
      const near = isAtEnd();
      const text = chunk.choices?.[0]?.delta?.content ?? "";
      watch.note(text, chunk.usage);
      turn.text += text;
      view.text.append(text);
      setText(view.meta, watch.describe());
      if (near) scrollDown();
    });
  } catch (error) {
    if (error instanceof Refused && error.status === 401) onRefused(error);
    outcome = controller.signal.aborted ? { note: "stopped" } : { fault: faultOf(error) };
  }
  const near = isAtEnd();
  chat.running = null;
  view.item.classList.remove("running");
  view.text.normalize();
  setText(view.meta, [watch.describe(), outcome.note].filter(Boolean).join(" · "));
  if (outcome.fault) showFault(view, turn, outcome.fault, onRefused);
  if (near) scrollDown();
  setText($("spoken"), outcome.fault ?? (turn.text || outcome.note || ""));
  const asked = document.activeElement === $("stop") || document.activeElement === document.body;
  drawComposer();
  if (asked && !matchMedia("(pointer: coarse)").matches) $("prompt").focus();
}

function makeAnswer() {
  const text = make("div", "text");
  const meta = make("p", "meta");
  const item = make("li", "turn assistant running", spoken("Answer: "), text, meta);
  $("turns").append(item);
  return { item, text, meta };
}

function showFault(view, turn, fault, onRefused) {
  view.item.insertBefore(make("p", "fault", fault), view.meta);
  if (turn.text !== "") return;
  const again = make("button", "quiet", "Try again");
  again.type = "button";
  again.addEventListener("click", () => {
    if (chat.running !== null || chat.turns.at(-1) !== turn) return;
    chat.turns.pop();
    view.item.remove();
    answer(onRefused);
  });
  view.item.append(again);
}

function faultOf(error) {
  if (error instanceof Refused) return error.message;
  if (error instanceof TypeError) return "The connection was lost before the answer was complete.";
  return String(error.message || error);
}

// Reads a streamed answer to its end, with each chunk given to `take`. Returns what there is to
// say of the end; raises Refused for an error of the server's, also in mid-stream.
async function readAnswer(body, signal, take) {
  const response = await link.request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let reason = null;
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return { note: reason === "length" ? "cut at the limit of tokens" : "" };
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(response.status, chunk.error.message);
    reason = chunk.choices?.[0]?.finish_reason ?? reason;
    take(chunk);
  }
  throw new TypeError("ended without its last event");
}

// The data of server-sent events; comments are passed over.
async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    // Leaving early, by an error too, ends the request.
    reader.cancel().catch(() => {});
  }
}

// Times of one answer: to its first token, and of the tokens after it.
class Stopwatch {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.firstTokens = 0;
    this.last = null;
    this.tokens = null;
  }

  note(text, usage) {
    const now = performance.now();
    const tokens = usage?.completion_tokens ?? null;
    if (tokens !== null) this.tokens = tokens;
    if (text === "") return;
    if (this.first === null) {
      this.first = now;
      this.firstTokens = this.tokens ?? 1;
    }
    this.last = now;
  }

  describe() {
    if (this.first === null) return "";
    const parts = [`first token after ${formatSeconds((this.first - this.began) / 1000)}`];
    const spent = (this.last - this.first) / 1000;
    const later = (this.tokens ?? 0) - this.firstTokens;
    if (later > 0 && spent > 0) parts.push(`${formatRate(later / spent)} tokens/s`);
    if (this.tokens !== null) parts.push(`${formatCount(this.tokens)} tokens`);
    return parts.join(" · ");
  }
}

function isAtEnd() {
  const scroller = $("scroller");
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
}

function scrollDown() {
  $("scroller").scrollTop = $("scroller").scrollHeight;
}
