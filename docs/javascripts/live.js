// Give a live page the colour scheme that the reader chose for the site. From a file, where a page may
// not touch another, it keeps the system's.
for (const frame of document.querySelectorAll("iframe.live")) {
  const follow = () => {
    let page = null;
    try {
      page = frame.contentDocument?.querySelector(".headwise");
    } catch {
      return;
    }
    if (!page) return;
    page.dataset.theme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
    frame.contentWindow.headwise?.app.refresh();
  };
  frame.addEventListener("load", follow);
  new MutationObserver(follow).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  follow();
}
