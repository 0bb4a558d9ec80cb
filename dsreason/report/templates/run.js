"use strict";
(() => {
  // Each list of cards has a form with the filters `tag`, `step` (optional) and `search`.
  for (const form of document.querySelectorAll("form.filters")) {
    const cards = [...form.parentElement.querySelectorAll(".card")];
    const { tag, step, search } = form.elements;
    const shown = form.querySelector("output");
    const texts = new Map(); // lower-case text of each card, cached at the first search

    function textOf(card) {
      if (!texts.has(card)) texts.set(card, card.textContent.toLowerCase());
      return texts.get(card);
    }

    function apply() {
      let count = 0;
      for (const card of cards) {
        const matches =
          (!tag.value || card.dataset.tags.split(" ").includes(tag.value)) &&
          (!step || !step.value || card.dataset.step === step.value) &&
          (!search.value || textOf(card).includes(search.value.toLowerCase()));
        card.hidden = !matches;
        count += matches;
      }
      shown.textContent = `${count} of ${cards.length} shown`;
    }

    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", apply);
    apply(); // browsers restore the filters when a page is reloaded
  }
})();
