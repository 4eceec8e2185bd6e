// Runs the script of the server's page on a document of its own: node page_stub.js PAGE URL
const fs = require("fs");
const html = fs.readFileSync(process.argv[2], "utf8");
const script = html.split("<script>")[1].split("</script>")[0];

class Element {
  constructor(tag) {
    Object.assign(this, {tag, children: [], own: "", className: "", value: "", scrollTop: 0});
  }
  set textContent(text) { this.own = String(text); this.children = []; }
  get textContent() { return this.own + this.children.map(one => one.textContent).join(""); }
  append(...added) { this.children.push(...added); }
  replaceChildren(...added) { this.own = ""; this.children = added; }
  scrollIntoView() {}
  focus() {}
  addEventListener() {}
}

const named = {};
for (const [, id] of html.matchAll(/id="([a-z]+)"/g)) named[id] = new Element(id);
Object.assign(named.temperature, {value: "0"});
Object.assign(named.tokens, {value: "100"});
Object.assign(named.mode, {value: "chat"});
const fetched = fetch;
Object.assign(globalThis, {
  document: {getElementById: id => named[id], createElement: tag => new Element(tag), hidden: false},
  fetch: (path, options) => fetched(process.argv[3] + path, options),
  setInterval: () => 0,
});

(async () => {
  const page = new Function(`${script}; return {ask, look};`)();
  await page.ask("hi");
  named.key.value = "k";
  await page.ask("hi");
  await page.ask("again");
  named.mode.value = "text";
  await page.ask("a:");
  await page.look();
  const turns = named.talk.children.map(one => [one.className, one.textContent,
    one.children.filter(span => span.className === "drafted").length]);
  console.log(JSON.stringify({turns, figures: named.figures.textContent,
    rates: named.rates.textContent, model: named.model.textContent}));
})();
