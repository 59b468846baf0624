// Repairs of the theme for keyboards and screen readers.
(() => {
  const each = (selector, repair) => document.querySelectorAll(selector).forEach(repair);

  const repair = () => {
    // what is read aloud must contain what is seen
    each("button.search-button-field, details > summary", (element) => element.removeAttribute("aria-label"));
    each(".theme-switch-button title", (title) => title.remove());
    each(".theme-switch-button :is(i, svg)", (icon) => {
      icon.removeAttribute("title");
      icon.setAttribute("aria-hidden", "true");
    });
    each(".citation-list > .citation", (citation) => citation.setAttribute("role", "listitem"));
    each(".bd-sidebar-primary .sidebar-primary-items__start", (bar) => {
      bar.setAttribute("role", "region");
      bar.setAttribute("aria-label", "Book sidebar");
    });
    // the corner of a data frame heads nothing
    each(".bd-article th:empty", (corner) => corner.replaceWith(document.createElement("td")));
    // a box that scrolls sideways must be reachable with the keyboard
    each(".bd-article :is(.pst-scrollable-table-container, .output.text_html, pre, mjx-container[display])", (box) => {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    });
  };

  document.addEventListener("DOMContentLoaded", repair);
  // formulas are set after the page has loaded
  addEventListener("load", () => Promise.resolve(window.MathJax?.startup?.promise).then(repair));
  addEventListener("resize", repair);
})();
