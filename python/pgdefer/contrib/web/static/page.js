"use strict";
// All boxes of a table at once.
document.addEventListener("change", (event) => {
  const name = event.target.dataset.all;
  if (!name) return;
  for (const box of event.target.form.querySelectorAll(`input[name="${name}"]`)) box.checked = event.target.checked;
});
// Times are entered in the zone of the browser, unless the address names another.
for (const zone of document.querySelectorAll("[data-zone]"))
  zone.value ||= Intl.DateTimeFormat().resolvedOptions().timeZone;
// Fresh figures while the page is seen and nobody reads: not in the background, not while something in it is
// selected, opened, scrolled or has the focus, and not further down, so that nothing moves under the reader's eyes.
const main = document.querySelector("main[data-refresh]");
const live = document.getElementById("live");
const stale = document.getElementById("stale");
let busy = false;
const isScrolled = () => [...main.querySelectorAll(".wide, pre")].some((part) => part.scrollLeft > 0 || part.scrollTop > 0);
async function refresh() {
  const selected = document.getSelection();
  if (busy || document.hidden || !live.checked || main.contains(document.activeElement)
      || main.querySelector("details[open]") || (selected && !selected.isCollapsed) || window.scrollY > 100 || isScrolled()) return;
  busy = true;
  let trouble = "";
  try {
    const answer = await fetch(location.href, { redirect: "manual", signal: AbortSignal.timeout(10000) });
    if (answer.type === "opaqueredirect") location.reload(); // to the login
    else if (!answer.ok) trouble = "the database does not answer";
    else {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      if (fresh && !main.contains(document.activeElement)) main.replaceChildren(...fresh.childNodes);
    }
  } catch {
    trouble = "the page's server does not answer";
  } finally { busy = false; }
  const text = trouble && `These figures are old, because ${trouble}. The page keeps trying.`;
  if (stale.textContent !== text) stale.textContent = text;
}
if (main) setInterval(refresh, Number(main.dataset.refresh) * 1000);

// The next slice of a call on all jobs that match, unless somebody stops it.
const next = document.querySelector("form[data-continue]");
if (next) setTimeout(() => next.requestSubmit(), 500);
