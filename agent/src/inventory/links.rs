//! Which devices reach each other past the IOMMU, so that one lease has all of them: GPUs with direct links, and what
//! is of one chip. Pure.

use std::collections::{BTreeMap, BTreeSet};

use types::{config::NodeSpec, node::Bdf};

use super::{
    Function,
    flaws::MELLANOX,
    rules::{NVIDIA, is_network_port, is_switch},
};

const AMD: u16 = 0x1002;

/// Base class of processing accelerators, which AMD's Instinct are from the MI300 on. Those that are cards of their
/// own without links are the fewest, and `machines.linked` tells. Source: PCI Code and ID Assignment 1.11 §1.19.
const ACCELERATORS: u32 = 0x12;

/// AMD's modules before them, two GPUs each: all of a server are one hive of Infinity Fabric. A guest that resets one
/// GPU may disturb all of the hive. Sources: PCI ID Project (MI250X, MI250); AMD SMI documentation, "GPU reset
/// behavior on XGMI systems".
const AMD_MODULES: [u16; 2] = [0x7408, 0x740c];

/// NVIDIA's modules (SXM) up to Hopper. In servers without NVSwitches their NVLinks lead to each other: DGX-1, boards
/// of four A100 or H100; so do those of the DGX Station with V100 (DGXS). Later ones have switches that are no PCI
/// devices. Sources: PCI ID Project; NVIDIA open-gpu-kernel-modules, `g_nv_name_released.h`.
const NVIDIA_MODULES: [u16; 23] = [
    0x15f9, // P100
    0x1db0, 0x1db1, 0x1db2, 0x1db5, 0x1db7, 0x1db8, 0x1df5, // V100
    0x20b0, 0x20b2, 0x20b3, 0x20bd, 0x20f3, // A100, A800
    0x2324, 0x2328, 0x2329, 0x232c, // H800, H20
    0x2330, 0x2335, 0x2336, 0x2337, 0x2338, 0x2339, // H100, H200
];

/// Sets of functions that reach each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Links(Vec<Vec<Bdf>>);

impl Links {
    /// Returns the sets of `functions`, which are all of the node. Bridges that somebody put between cards are seen by
    /// drivers only, so the configuration names them. An empty list there says that models link nothing.
    pub(super) fn of(functions: &[&Function], spec: Option<&NodeSpec>) -> Self {
        let mut sets = chips(functions);
        match spec.and_then(|spec| spec.machines.linked.as_deref()) {
            Some([]) => {}
            said => {
                sets.extend(said.unwrap_or_default().iter().cloned());
                sets.extend(modules(functions));
            }
        }
        Self(sets)
    }

    /// Returns what is in a set with `address`, in order.
    pub(super) fn with(&self, address: Bdf) -> Vec<Bdf> {
        let sets = self.0.iter().filter(|set| set.contains(&address));
        let others: BTreeSet<_> = sets.flatten().filter(|other| **other != address).collect();
        others.into_iter().copied().collect()
    }
}

/// Returns the GPUs whose models are linked.
fn modules(functions: &[&Function]) -> [Vec<Bdf>; 2] {
    let switched = functions.iter().any(|function| is_switch(function));
    let all = |is: &dyn Fn(&Function) -> bool| {
        functions.iter().filter(|function| is(function)).map(|f| f.address).collect()
    };
    let amds = all(&|function| {
        let is_module = AMD_MODULES.contains(&function.device);
        function.vendor == AMD && (function.class >> 16 == ACCELERATORS || is_module)
    });
    let nvidias = all(&|function| {
        function.vendor == NVIDIA && NVIDIA_MODULES.contains(&function.device) && !switched
    });
    [amds, nvidias]
}

/// Returns what is of one chip: ports of a network card, which reset all of them, and what is below the switch of one,
/// with each function of the card, whose firmware rules over the switch. Without the card that switch parts what is
/// below it as any other does. Virtual functions are made to be apart.
fn chips(functions: &[&Function]) -> Vec<Vec<Bdf>> {
    let mut slots: BTreeMap<Bdf, Vec<Bdf>> = BTreeMap::new();
    let mut switches: BTreeMap<Bdf, Vec<&Function>> = BTreeMap::new();
    for function in functions.iter().filter(|function| !function.is_virtual) {
        if is_network_port(function) {
            let slot = Bdf { function: 0, ..function.address };
            slots.entry(slot).or_default().push(function.address);
        }
        if let Some(port) = function.below_card {
            switches.entry(port).or_default().push(function);
        }
    }
    let pairs = switches.values().flat_map(|below| {
        let cards = below.iter().filter(|function| function.vendor == MELLANOX);
        cards.flat_map(|card| below.iter().map(|other| vec![card.address, other.address]))
    });
    slots.into_values().chain(pairs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u8, vendor: u16, device: u16, class: u32) -> Function {
        Function {
            address: address(number),
            vendor,
            device,
            class,
            header: 0,
            group: Some(number.into()),
            numa: None,
            driver: None,
            uses: Vec::new(),
            virtual_functions: 0,
            flaws: Vec::new(),
            leads_to_switches: Some(false),
            is_virtual: false,
            below_card: None,
        }
    }

    fn address(number: u8) -> Bdf {
        Bdf { segment: 0, bus: number, device: 0, function: 0 }
    }

    /// What each of `list` is linked to, by their places in it.
    fn linked(list: &[Function], spec: Option<&NodeSpec>) -> Vec<Vec<u8>> {
        let links = Links::of(&list.iter().collect::<Vec<_>>(), spec);
        list.iter().map(|f| links.with(f.address).iter().map(|bdf| bdf.bus).collect()).collect()
    }

    const NONE: Vec<u8> = Vec::new();

    fn said(machines: &str) -> NodeSpec {
        let key = "01".repeat(32);
        let text =
            format!("version = 1\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n{machines}\n");
        NodeSpec::parse(text.as_bytes()).expect("valid")
    }

    #[test]
    fn modules_without_switches_are_linked_to_each_other() {
        let a100 = |number| gpu(number, NVIDIA, 0x20b2, 0x03_0200);
        let card = gpu(2, NVIDIA, 0x20b5, 0x03_0200);
        let mut board = vec![a100(0), a100(1), card];
        assert_eq!(linked(&board, None), [vec![1], vec![0], NONE]);
        board.push(gpu(3, NVIDIA, 0x1af1, 0x06_8000));
        assert_eq!(linked(&board, None), [NONE; 4], "the switch's rule is for them");
    }

    #[test]
    fn ports_of_one_chip_are_one_set_and_virtual_functions_are_apart() {
        let port = |number: u8| Function {
            address: Bdf { segment: 0, bus: 9, device: 0, function: number },
            ..gpu(number, 0x8086, 0x1592, 0x02_0000)
        };
        let mut card = [port(0), port(1), Function { is_virtual: true, ..port(2) }];
        assert_eq!(linked(&card, None), [vec![9], vec![9], NONE]);
        card[1].class = 0x01_0802;
        assert_eq!(linked(&card, None), [NONE; 3]);
    }

    #[test]
    fn what_is_below_a_network_card_s_switch_goes_with_the_card() {
        let below = |number, card: Option<u8>| Function {
            below_card: card.map(address),
            ..gpu(number, NVIDIA, 0x2330, 0x03_0200)
        };
        let card = |number, below| Function {
            below_card: Some(address(below)),
            ..gpu(number, MELLANOX, 0x1023, 0x02_0000)
        };
        let gpus = [below(0, Some(20)), below(1, Some(20)), below(2, Some(21)), below(3, None)];
        let apart = "[machines]\nlinked = []";
        let switch = gpu(30, NVIDIA, 0x22a3, 0x06_8000);
        let cards = [switch, card(4, 20), Function { is_virtual: true, ..card(5, 21) }];
        let list: Vec<_> = gpus.into_iter().chain(cards).collect();
        let expected = [vec![4], vec![4], NONE, NONE, NONE, vec![0, 1], NONE];
        assert_eq!(linked(&list, None), expected, "the card is between the GPUs");
        assert_eq!(linked(&list, Some(&said(apart))), linked(&list, None));
    }

    #[test]
    fn amds_modules_are_one_hive_and_cards_of_both_makers_are_apart() {
        let mi300 = |number| gpu(number, AMD, 0x74a1, 0x12_0000);
        let board = [mi300(0), gpu(1, AMD, 0x73bf, 0x03_0000), mi300(2), mi300(3)];
        assert_eq!(linked(&board, None), [vec![2, 3], NONE, vec![0, 3], vec![0, 2]]);
        let older = [gpu(0, AMD, 0x7408, 0x03_8000), gpu(1, AMD, 0x7408, 0x03_8000)];
        assert_eq!(linked(&older, None), [vec![1], vec![0]]);
    }

    #[test]
    fn the_configuration_adds_sets_or_says_that_there_are_none() {
        let board = [0, 1, 2].map(|number| gpu(number, AMD, 0x74a1, 0x12_0000));
        let none = said("[machines]\nlinked = []");
        assert_eq!(linked(&board, Some(&none)), [NONE; 3]);
        let pair = said("[machines]\nlinked = [[\"0000:00:00.0\", \"0000:02:00.0\"]]");
        let cards = [0, 1, 2].map(|number| gpu(number, NVIDIA, 0x20b5, 0x03_0200));
        assert_eq!(linked(&cards, Some(&pair)), [vec![2], NONE, vec![0]]);
        assert_eq!(linked(&board, Some(&pair)), linked(&board, None), "models count beside it");
    }
}
