"use strict";
(() => {
  const cards = [...document.querySelectorAll(".card")];
  const [verdict, dataset, kind, search] = ["verdict", "dataset", "kind", "search"].map((id) => document.getElementById(id));
  const shown = document.getElementById("shown");
  const nothing = document.getElementById("nothing");
  const texts = new Map(); // lower-case text of each card, cached at the first search

  function textOf(card) {
    if (!texts.has(card)) texts.set(card, card.textContent.toLowerCase());
    return texts.get(card);
  }

  function matches(card) {
    return (
      (!verdict.value || card.dataset.tags.split(" ").includes(verdict.value)) &&
      (!dataset.value || card.dataset.dataset === dataset.value) &&
      (!kind.value || card.dataset.kind === kind.value) &&
      (!search.value || textOf(card).includes(search.value.toLowerCase()))
    );
  }

  function apply() {
    let count = 0;
    for (const card of cards) {
      card.hidden = !matches(card);
      count += !card.hidden;
    }
    shown.textContent = `${count} of ${cards.length} shown`;
    nothing.hidden = count > 0;
  }

  // "#wrong" sets the filter; "#q12", the anchor of a card, shows the card regardless of the filters.
  function followAddress() {
    const name = location.hash.slice(1);
    if ([...verdict.options].some((option) => option.value && option.value === name)) {
      verdict.value = name;
      apply();
      document.getElementById("questions").scrollIntoView();
      return;
    }
    const card = document.getElementById(name);
    if (card && card.hidden) {
      filters.reset();
      apply();
      card.scrollIntoView();
    }
  }

  const filters = document.getElementById("filters");
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("input", apply);
  addEventListener("hashchange", followAddress);
  apply(); // browsers restore the filters when a page is reloaded
  followAddress();
})();
