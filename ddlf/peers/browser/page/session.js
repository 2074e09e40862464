// Joins the training of a link, and reads what the server says of its model.

import { Refused } from "./refused.js";

export const FORMAT = 1; // of layer graphs that this build of the page understands
const GONE = ["The server does not answer.", "Check that `ddlf peers serve` still runs and that you are online, then reload this page."];

async function asked(path, options) {
  try {
    return await fetch(path, { cache: "no-store", credentials: "same-origin", ...options });
  } catch {
    throw new Refused(...GONE);
  }
}

// Use the code behind the # of the address, if there is one, and remove it from there.
export async function join() {
  const [code] = location.hash.slice(1).split(".");
  if (!code) return;
  history.replaceState(null, "", location.pathname);
  const answer = await asked("/join", { headers: { "X-DDLF-Code": code } });
  if (answer.status === 403) {
    if ((await asked("/graph")).status !== 401) return; // this browser has used the link itself
    throw new Refused("This link was used already, or it has expired.", "Each link is for one person, once. Ask for a new one: `ddlf peers invite`.");
  }
  if (!answer.ok) throw new Refused(`The server refuses this link: ${(await answer.text()).slice(0, 200)}`, "Ask for a new one: `ddlf peers invite`.");
}

// Return {graph, plan, name, classes}.
export async function readGraph() {
  const answer = await asked("/graph");
  if (answer.status === 401 || answer.status === 403) {
    throw new Refused("This browser has no place in this training.", "Open the whole link, with the part behind #. A link of another run is void here: ask for a new one.");
  }
  if (answer.status === 409) throw new Refused(`This model cannot be trained in a browser: ${(await answer.text()).slice(0, 500)}`, "Take part with Python: `ddlf peers join LINK --data mine.npz`.");
  if (!answer.ok) throw new Refused(`The server has no model for this page (status ${answer.status}).`, "Reload this page. If that changes nothing, the server is of another build of DDLF.");
  const found = await answer.json();
  if (found.graph?.format !== FORMAT) throw new Refused("This page is of an older build than the server.", "Reload this page without its cache: Ctrl+Shift+R, on a Mac Cmd+Shift+R.");
  return found;
}
