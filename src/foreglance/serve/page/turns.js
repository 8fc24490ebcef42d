/** The conversation: turns as data, each with its elements on the page, and the messages that the next request sends.
 *
 * Text of users and models enters the page as text nodes alone.
 */
import { Steps } from "./steps.js";

const clone = (template) => template.content.firstElementChild.cloneNode(true);

/** One question. Pictures come before the text, as vision-language models are trained. */
class Question {
  constructor(text, pictures, template) {
    this.text = text;
    this.pictures = pictures;
    this.element = clone(template);
    this.element.querySelector(".said").textContent = text;
    this.element.querySelector(".said").hidden = !text;
    const list = this.element.querySelector(".pictures");
    list.hidden = !pictures.length;
    for (const { name, url } of pictures) {
      const image = document.createElement("img");
      image.src = url;
      image.alt = name;
      const item = document.createElement("li");
      item.append(image);
      list.append(item);
    }
  }

  get message() {
    const images = this.pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: [...images, ...(this.text ? [{ type: "text", text: this.text }] : [])] };
  }
}

/** One answer, growing token by token. `text` is what goes back to the server with the next question. */
export class Answer {
  constructor(template) {
    this.element = clone(template);
    this.text = "";
    this.tokens = [];
    this.steps = new Steps();
    this.textElement = this.part(".text");
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  /** Take what one chunk brings: its text for the conversation, its tokens, of one step, for the eye. */
  take({ text, reasoning, tokens, drafted }) {
    this.text += text;
    // runs of spaces are kept where there are any; elsewhere a space at the end of a line would be marked beyond the text
    this.textElement.classList.toggle("spaced", /[ \t]{2}|\t|\n /.test(this.text));
    if (reasoning) this.part(".reasoning").hidden = false;
    this.count(tokens, drafted);
    this.write(tokens, [
      { element: this.part(".reasoning p"), rest: reasoning },
      { element: this.textElement, rest: text },
    ]);
  }

  count(tokens, drafted) {
    if (!tokens.length) return;
    this.firstAt ??= performance.now();
    const step = this.steps.add(tokens, drafted);
    this.tokens.push(...tokens.map((token) => ({ ...token, step })));
  }

  /** Reasoning and text are written as the server splits them; a token is marked where its text is found in them, and
   * one that is not there, such as the end of the reasoning, does not show. */
  write(tokens, places) {
    const first = this.tokens.length - tokens.length;
    tokens.forEach((token, i) => {
      for (const words of [token.text, token.text.trimStart()]) {
        const place = words && places.find(({ rest }) => rest.includes(words));
        if (!place) continue;
        const at = place.rest.indexOf(words);
        place.element.append(place.rest.slice(0, at));
        this.show(place.element, words, token.depth, first + i);
        place.rest = place.rest.slice(at + words.length);
        return;
      }
    });
    for (const { element, rest } of places) element.append(rest);
  }

  /** Tokens after the first over the time since: the server's figure once there is one. */
  get tokensPerSecond() {
    if (this.timings) return this.timings.predicted_per_second;
    const seconds = (performance.now() - this.firstAt) / 1000;
    return seconds > 0.2 ? (this.steps.tokens - 1) / seconds : null;
  }

  show(element, words, depth, index) {
    const span = document.createElement("span");
    span.className = "token";
    span.dataset.depth = depth;
    span.dataset.index = index;
    // the space before a run of drafts is not marked
    const space = depth === 1 ? words.match(/^\s*/)[0] : "";
    span.textContent = words.slice(space.length);
    element.append(space, span);
  }

  /** A token in words, for the tip and for screen readers. */
  describe(index) {
    const { id, depth, step } = this.tokens[index];
    const from = depth ? `accepted draft, depth ${depth}` : "the model’s own pick";
    return `${from} · ${step ? `step ${step}` : "from the prompt"} · token ${id}`;
  }

  fail(sentence) {
    const trouble = this.part(".trouble");
    trouble.textContent = sentence;
    trouble.hidden = !sentence;
  }
}

/** All turns in order. */
export class Conversation {
  constructor(element, questionTemplate, answerTemplate) {
    this.element = element;
    this.questionTemplate = questionTemplate;
    this.answerTemplate = answerTemplate;
    this.turns = [];
  }

  add(text, pictures) {
    const question = new Question(text, pictures, this.questionTemplate);
    const turn = { question, answer: null };
    this.turns.push(turn);
    this.element.append(question.element);
    return turn;
  }

  /** A fresh answer for a turn, in place of the one that it had. */
  answer(turn) {
    const answer = new Answer(this.answerTemplate);
    if (turn.answer) turn.answer.element.replaceWith(answer.element);
    else this.element.append(answer.element);
    turn.answer = answer;
    return answer;
  }

  /** What a request for an answer to `last` sends. Earlier questions that were never answered are left out. */
  messages(last, system) {
    const head = system.trim() ? [{ role: "system", content: system }] : [];
    const before = this.turns
      .slice(0, this.turns.indexOf(last))
      .filter((turn) => turn.answer?.text)
      .flatMap((turn) => [turn.question.message, { role: "assistant", content: turn.answer.text }]);
    return [...head, ...before, last.question.message];
  }

  get last() {
    return this.turns.at(-1) ?? null;
  }

  clear() {
    for (const { question, answer } of this.turns) {
      question.element.remove();
      answer?.element.remove();
    }
    this.turns = [];
  }
}
