/** Counts what the steps of an answer gained, as the engine's own timings do. Pure: numbers in, numbers out.
 *
 * A step tests `drafted` guesses. It gains those that stood (depths 1, 2, ...) and one token that is the target's own
 * (depth 0), unless the text ends before it. The first token comes of the prompt and belongs to no step.
 */
export class Steps {
  constructor() {
    this.tokens = 0;
    this.steps = 0;
    this.tried = [];
    this.stood = [];
  }

  /** Count one step; returns its number, 0 for the prompt's. A guess is tried if those before it stood. */
  add(tokens, drafted) {
    if (this.tokens > 0) this.steps += 1;
    this.tokens += tokens.length;
    const accepted = tokens.filter(({ depth }) => depth > 0).length;
    for (let i = 0; i < Math.min(drafted, accepted + 1); i += 1) {
      this.tried[i] = (this.tried[i] ?? 0) + 1;
      this.stood[i] = (this.stood[i] ?? 0) + (i < accepted);
    }
    return this.steps;
  }

  get tokensPerStep() {
    return this.steps ? (this.tokens - 1) / this.steps : null;
  }
}
