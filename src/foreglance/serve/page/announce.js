/** What a screen reader hears: an answer sentence by sentence as it comes, and short notices.
 *
 * Sentences are added to a log, so that none replaces another before it was read. Notices replace each other.
 */
export class Announcer {
  constructor(log, status) {
    this.log = log;
    this.status = status;
    this.held = "";
  }

  notice(sentence) {
    this.status.textContent = sentence;
  }

  begin() {
    this.log.replaceChildren();
    this.held = "";
  }

  text(piece) {
    this.held += piece;
    const sentences = this.held.match(/^[\s\S]*(?:[.!?](?=\s)|[。！？\n])/)?.[0] ?? "";
    this.say(sentences);
    this.held = this.held.slice(sentences.length);
  }

  end(sentence) {
    this.say(this.held);
    this.held = "";
    this.say(sentence);
  }

  say(text) {
    if (!text.trim()) return;
    const line = document.createElement("p");
    line.textContent = text.trim();
    this.log.append(line);
  }
}
