// The filter of the claims page. Its state is the query of the address, so that a filtered view can be linked.
document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form.claims-filter");
  if (!form) return;
  const rows = [...document.querySelectorAll("table.claims tbody tr")];
  const fields = [...form.elements].filter((field) => field.name);
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  const fits = (row, { name, value }) =>
    name === "text"
      ? value.toLowerCase().split(/\s+/).every((word) => texts.get(row).includes(word))
      : !value || row.classList.contains(`${name}-${value}`);

  const show = () => {
    for (const row of rows) row.hidden = !fields.every((field) => fits(row, field));
    const shown = rows.filter((row) => !row.hidden).length;
    form.querySelector("[role=status]").textContent = `${shown} of ${rows.length} claims shown`;
  };

  const keep = () => {
    const query = new URLSearchParams(fields.filter(({ value }) => value).map(({ name, value }) => [name, value]));
    history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
  };

  const query = new URLSearchParams(location.search);
  for (const field of fields) {
    field.value = query.get(field.name) ?? "";
    if (field.selectedIndex === -1) field.value = ""; // a chapter or a verdict that is no longer there
  }
  form.hidden = false;
  show();
  document.getElementById(location.hash.slice(1))?.scrollIntoView(); // the form has moved the table down
  form.addEventListener("input", () => (show(), keep()));
  form.addEventListener("reset", () => setTimeout(() => (show(), keep())));
  form.addEventListener("submit", (event) => event.preventDefault());
});
