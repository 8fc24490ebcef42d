/** Brings the page to life: the composer, the running answer, theme, panel and key. The parts do not know each other. */
import { Announcer } from "./announce.js";
import { ApiError, getJson, key, stream } from "./api.js";
import { Attachments, filesOf } from "./images.js";
import { Meter, decimal, percent, sum } from "./meter.js";
import { RowsPanel } from "./rows.js";
import { Settings } from "./settings.js";
import { Tips } from "./tips.js";
import { Conversation } from "./turns.js";

const $ = (id) => document.getElementById(id);
const prompt = $("prompt");
const scroll = $("scroll");

const announcer = new Announcer($("log"), $("status"));
const tell = (sentence) => announcer.notice(sentence);
const attachments = new Attachments($("thumbs"), $("thumb"), note, tell);
const conversation = new Conversation($("conversation"), $("user-turn"), $("answer-turn"));
const meter = new Meter();
const tips = new Tips($("tip"), tell);
const rows = new RowsPanel($("rows"), explained);

const settings = new Settings($("settings"));

let ready = false; // /props has answered
let running = null; // the AbortController of the answer that is being written

// The composer

/** A notice below the message box, for all eyes and ears. */
function note(sentence) {
  $("notice").textContent = sentence;
}

function send() {
  if (running || !ready) return;
  const text = prompt.value.trim();
  if (!text && !attachments.pictures.length) return note("Write something, or attach a picture.");
  if (settings.wrong) return note(settings.wrong);
  note("");
  $("welcome").hidden = true;
  const turn = conversation.add(text, attachments.take());
  prompt.value = "";
  fit();
  scroll.scrollTop = scroll.scrollHeight;
  respond(turn);
}

/** The message box grows with its text. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function busy(controller) {
  const focused = document.activeElement;
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  if (focused === $("send") || focused === $("stop")) prompt.focus();
}

function stop() {
  running?.abort();
}

// The running answer

/** What asks for an answer to `turn`. */
const request = (turn) => ({
  ...settings.body,
  messages: conversation.messages(turn, settings.system),
});

async function respond(turn) {
  tips.hide();
  const answer = conversation.answer(turn);
  answer.request = request(turn);
  tips.watch(answer);
  wire(answer, turn);
  meter.clear();
  announcer.begin();
  tell("Answering.");
  await write(answer);
  following(() => {
    answer.part(".turn-buttons").hidden = false;
    answer.part(".compare").hidden = !comparable(answer);
    answer.part(".copy").hidden = !answer.text || !navigator.clipboard; // there is none on plain http from elsewhere
  });
  announcer.end(answer.part(".facts").textContent);
  rows.refresh();
}

/** Stream into `answer`; whatever goes wrong is said there and what has come stays. */
async function write(answer) {
  const controller = new AbortController();
  busy(controller);
  answer.element.setAttribute("aria-busy", "true");
  try {
    for await (const chunk of stream(streamed(answer.request), controller.signal)) take(answer, chunk);
  } catch (error) {
    if (controller.signal.aborted) answer.stopped = true;
    else failed(answer, error);
  }
  answer.element.removeAttribute("aria-busy");
  if (running === controller) busy(null);
  facts(answer);
}

const streamed = (body) => ({ ...body, stream: true, return_tokens: true, stream_options: { include_usage: true } });

function take(answer, chunk) {
  following(() => {
    const choice = chunk.choices[0];
    const text = choice?.delta?.content ?? "";
    const reasoning = choice?.delta?.reasoning_content ?? "";
    answer.finish = choice?.finish_reason ?? answer.finish;
    answer.timings = chunk.timings ?? answer.timings;
    answer.take({ text, reasoning, tokens: chunk.tokens ?? [], drafted: chunk.drafted ?? 0 });
    announcer.text(text);
    facts(answer);
  });
  meter.show(answer);
}

/** Change the conversation; if its end was in sight it stays in sight. */
function following(change) {
  const follow = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  change();
  if (follow) scroll.scrollTop = scroll.scrollHeight;
}

function failed(answer, error) {
  const wait = error instanceof ApiError && error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  answer.fail(error.message + wait);
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 401) askKey();
}

/** The line below an answer. */
function facts(answer) {
  const { timings, steps, stopped, finish } = answer;
  const parts = [];
  if (stopped) parts.push("Stopped");
  if (finish === "length") parts.push("Cut at the token limit");
  if (steps.tokens) parts.push(`${steps.tokens} tokens`, `${decimal(steps.tokensPerStep, 2)} per step`);
  if (steps.tokens) parts.push(`${decimal(answer.tokensPerSecond, 1)} tokens/s`);
  if (steps.tried.length) parts.push(`${percent(sum(steps.stood), sum(steps.tried))} of guesses accepted`);
  if (timings?.cache_n) parts.push(`${timings.cache_n} rows reused`);
  answer.part(".facts").textContent = parts.join(" · ");
}

const comparable = (answer) => Boolean(answer.timings?.draft_n && answer.finish);

function wire(answer, turn) {
  answer.part(".again").addEventListener("click", () => {
    if (running) return;
    prompt.focus();
    respond(turn);
  });
  answer.part(".compare").addEventListener("click", () => compare(answer));
  answer.part(".copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(answer.text);
    tell("Copied.");
  });
}

/** The same request once more with drafts off: are the tokens the same, and how long do they take? */
async function compare(answer) {
  if (running) return;
  const controller = new AbortController();
  const ids = [];
  let timings = null;
  const verdict = answer.part(".verdict");
  verdict.textContent = "Drafts off: running …";
  busy(controller);
  try {
    for await (const chunk of stream(streamed({ ...answer.request, speculative: { depth: 0 } }), controller.signal)) {
      ids.push(...(chunk.tokens ?? []).map(({ id }) => id));
      timings = chunk.timings ?? timings;
    }
    verdict.textContent = judge(answer, ids, timings);
  } catch (error) {
    verdict.textContent = controller.signal.aborted ? "Drafts off: stopped." : `Drafts off: ${error.message}`;
  }
  busy(null);
}

function judge(answer, ids, timings) {
  const on = answer.tokens.map(({ id }) => id);
  const speeds = `${decimal(answer.timings.predicted_per_second, 1)} tokens/s with drafts, ${decimal(timings.predicted_per_second, 1)} without`;
  const differ = ids.findIndex((id, i) => id !== on[i]);
  if (differ < 0 && ids.length === on.length) return `Drafts off: the same ${ids.length} tokens. ${speeds}.`;
  return `Drafts off: the text differs from token ${(differ < 0 ? Math.min(ids.length, on.length) : differ) + 1} on. ${speeds}.`;
}

/** What the rows panel shows: what the last answer came from, else what is about to be sent. */
function explained() {
  if (conversation.last) return { messages: conversation.messages(conversation.last, settings.system) };
  const pictures = attachments.pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  const text = prompt.value.trim() ? [{ type: "text", text: prompt.value }] : [];
  const content = [...pictures, ...text];
  return content.length ? { messages: [{ role: "user", content }] } : null;
}

function newChat() {
  stop();
  tips.hide();
  conversation.clear();
  attachments.take();
  meter.clear();
  $("welcome").hidden = false;
  note("");
  tell("New chat.");
  prompt.focus();
  rows.refresh();
}

// Pictures

async function example() {
  const blob = await (await fetch("example.png")).blob();
  await attachments.add([new File([blob], "scene.png", { type: "image/png" })]);
  prompt.value ||= "Describe the image.";
  prompt.focus();
}

function dropping(event) {
  if (![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  $("drop").hidden = false;
}

// The page around

function theme(name) {
  if (name) {
    document.documentElement.dataset.theme = name;
    localStorage.setItem("foreglance.theme", name);
  }
  $("theme").setAttribute("aria-pressed", String(isDark()));
}

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen !== "system" ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function panel(open) {
  document.body.classList.toggle("panel-is-open", open);
  $("panel-open").setAttribute("aria-expanded", String(open));
  $(open ? "panel-close" : "panel-open").focus();
}

function askKey() {
  $("key").value = "";
  $("key-dialog").showModal();
}

async function useKey() {
  key.set($("key").value.trim());
  await begin();
}

/** Ask the server what it offers. Without an answer the page says so and stays. */
async function begin() {
  try {
    const props = await getJson("props");
    settings.offer(props);
    ready = true;
    attachments.limits = { bytes: props.limits?.body_bytes };
    $("model").textContent = props.model;
    $("model").hidden = false;
    note("");
  } catch (error) {
    note(error.message);
    if (error.status === 401) askKey();
    else if (!(error instanceof ApiError)) throw error;
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("paste", (event) => {
  const files = filesOf(event.clipboardData);
  if (!files.length) return;
  event.preventDefault();
  attachments.add(files);
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", newChat);
$("example").addEventListener("click", example);
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", async () => {
  await attachments.add([...$("files").files]);
  $("files").value = "";
  prompt.focus();
});
$("thumbs").addEventListener("emptied", () => prompt.focus());
document.addEventListener("dragover", dropping);
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("drop").hidden = true;
});
document.addEventListener("drop", (event) => {
  $("drop").hidden = true;
  const files = filesOf(event.dataTransfer);
  if (!files.length) return;
  event.preventDefault();
  attachments.add(files);
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || $("key-dialog").open) return;
  if (tips.hide()) return;
  if (running) stop();
  else if (document.body.classList.contains("panel-is-open")) panel(false);
});
$("theme").addEventListener("click", () => theme(isDark() ? "light" : "dark"));
$("panel-open").addEventListener("click", () => panel(!document.body.classList.contains("panel-is-open")));
$("panel-close").addEventListener("click", () => panel(false));
$("marks").addEventListener("change", () => document.body.classList.toggle("no-marks", !$("marks").checked));
$("key-open").addEventListener("click", askKey);
$("key-form").addEventListener("submit", useKey);
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme());

theme();
begin();
