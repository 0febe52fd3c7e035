// The search runs in a worker, which browsers refuse to a page opened from the disk: there it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.answer = (answer) => {
        const data = structuredClone(answer);
        setTimeout(() => this.onmessage?.({ data }));
      };
      document.body.append(this.frame);
      const inside = this.frame.contentDocument;
      inside.open();
      this.ready = new Promise((resolve) => { this.frame.contentWindow.onload = resolve; });
      inside.write(`<script>postMessage = frameElement.answer</script><script src="${url}"></script>`);
      inside.close();
    }

    postMessage(message) {
      const data = structuredClone(message);
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() { this.frame.remove(); }
  };
}
