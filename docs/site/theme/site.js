// The search: every word must occur in a section; a word in its title counts most. The index is a separate script.
const query = document.getElementById("query"), found = document.getElementById("found");
let chosen = -1;

function score(section, words) {
  const title = section.title.toLowerCase(), text = section.text.toLowerCase();
  let sum = 0;
  for (const word of words) {
    const at = text.indexOf(word), inTitle = title.includes(word);
    if (at < 0 && !inTitle) return 0;
    sum += (inTitle ? 10 : 0) + Math.min(5, text.split(word).length - 1);
  }
  return sum;
}

function excerpt(section, words) {
  const line = document.createElement("span");
  const text = section.text, at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 40);
  const cut = (at > 0 ? "…" : "") + text.slice(at, at + 140);
  const pattern = new RegExp(`(${words.map((w) => w.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "gi");
  cut.split(pattern).forEach((part, i) => {
    const piece = document.createElement(i % 2 ? "mark" : "span");
    piece.textContent = part;
    line.append(piece);
  });
  return line;
}

function search() {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  chosen = -1;
  found.replaceChildren();
  found.hidden = !words.length;
  if (!words.length) return;
  const ranked = INDEX.map((section) => [score(section, words), section]).filter(([points]) => points > 0);
  ranked.sort((a, b) => b[0] - a[0]);
  for (const [, section] of ranked.slice(0, 12)) {
    const item = document.createElement("li"), link = document.createElement("a"), title = document.createElement("b");
    link.href = `${query.dataset.base}/${section.url}`;
    title.textContent = section.title;
    link.append(title, excerpt(section, words));
    item.append(link);
    found.append(item);
  }
  if (!ranked.length) {
    const item = document.createElement("li");
    item.textContent = "Nothing found.";
    found.append(item);
  }
}

query.addEventListener("input", search);
query.addEventListener("keydown", (event) => {
  const links = [...found.querySelectorAll("a")];
  if (event.key === "Escape") found.hidden = true;
  if (event.key === "Enter" && links.length) location.href = links[Math.max(0, chosen)].href;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    chosen = Math.max(0, Math.min(links.length - 1, chosen + (event.key === "ArrowDown" ? 1 : -1)));
    links.forEach((link, i) => link.classList.toggle("chosen", i === chosen));
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== query) { event.preventDefault(); query.focus(); }
});
document.addEventListener("click", (event) => { if (!event.target.closest("search")) found.hidden = true; });
if (matchMedia("(max-width: 60rem)").matches) document.querySelector(".menu").open = false;
