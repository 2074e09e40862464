// An error that a person can mend: one sentence, and a hint with the next step.

export class Refused extends Error {
  constructor(sentence, hint = "") {
    super(sentence);
    this.hint = hint;
  }
}

// Return at most `most` names, and how many more there are.
export function named(names, most = 5) {
  const shown = names.slice(0, most).join(", ");
  return names.length > most ? `${shown} and ${(names.length - most).toLocaleString("en")} more` : shown;
}
