// @ts-check
// To share what is shown: a link that leaves nothing to the page's choice, and a card, a picture for a message or a slide.

import { formatAddress } from "./address.js";
import { model, models } from "./api.js";
import { cardPicture, storyOf } from "./card.js";
import { soft } from "./parts.js";
import { h } from "./render.js";
import { download, item, menu } from "./save.js";

/** The address with the sentence, the view and what is chosen, and without the key of this server. @param {any} state */
export function completeLink(state) {
  const link = new URL(location.href);
  const secret = link.searchParams.has("key");
  link.searchParams.delete("key");
  if (models.length > 1) link.searchParams.set("model", model);
  link.hash = formatAddress({ ...state, text: state.overview.text });
  return { link: link.href, secret };
}

/** @param {any} state */
export function shareMenu(state) {
  const { link, secret } = completeLink(state),
    file = `${state.table.name}-${state.view}.png`.replace(/[^\p{L}\p{N}.]+/gu, "-");
  return menu("Share", "Share ▾", [
    item("copy link", () => navigator.clipboard.writeText(link)),
    item("save card", async () => download(file, await cardPicture(state))),
    h("p.soft", { id: "card-story" }, `The card begins: ${storyOf(state)}`),
    soft(
      secret
        ? "The link has the sentence, the view and what is chosen, not the key of this server: to open it, put what follows # behind " +
            "the address that handgrad explain printed."
        : "The link has the sentence, the view and what is chosen.",
    ),
  ]);
}
