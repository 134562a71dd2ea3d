// What the pages of Sphinx and Furo lack for keyboards and screen readers.
function all(selector, change) {
  document.querySelectorAll(selector).forEach(change);
}

// what is wider than its column can be scrolled by keyboard, too
function reachWide() {
  all("pre, .table-wrapper", (its) => {
    if (its.scrollWidth > its.clientWidth) its.tabIndex = 0;
    else its.removeAttribute("tabindex");
  });
}

addEventListener("DOMContentLoaded", () => {
  all("p.caption[role=heading]", (its) => its.setAttribute("aria-level", "2"));
  all("aside.toc-drawer", (its) => its.setAttribute("aria-label", "On this page"));
  // a signature on several lines is a <dl> without a <dt>
  all(".sig > dl", (its) => its.setAttribute("role", "list"));
  all(".sig > dl > dd", (its) => its.setAttribute("role", "listitem"));
  reachWide();
  addEventListener("resize", reachWide);
});
